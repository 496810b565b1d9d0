"""The start of an engine beside a trainer: vLLM's own demand on a device, whose memory a stand-in reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.requests import position_seed
from tests.full.engines.start_ranks import GIB, demanded_bytes, graphs_chosen, seeds_of
from tests.gloo.ranks import RankLauncher


def test_vllm_starts_on_a_device_that_a_trainer_has_a_sixth_of(
    tmp_path: Path, run_ranks: RankLauncher
) -> None:
    settings = EngineSettings(64, kv_cache_bytes=24 * GIB)
    (demanded,) = run_ranks(1, demanded_bytes, tmp_path, settings)
    assert isinstance(demanded, int), (
        demanded
    )  # vLLM's default, 92% of 80 GiB, is more than the 67 that are free
    assert demanded <= GIB


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "expected"),
    [(None, True, True), (None, False, False), (False, True, False), (True, True, True)],
)
def test_gpus_capture_graphs_by_default(
    wanted: bool | None, on_gpu: bool, expected: bool, run_ranks: RankLauncher
) -> None:
    (chosen,) = run_ranks(1, graphs_chosen, wanted, on_gpu)
    assert chosen is expected


def test_seeds_follow_the_model_runner(run_ranks: RankLauncher) -> None:
    """vLLM's second runner, which is for GPUs, draws by a request's seed and a token's place: the rest has the same."""
    (first,) = run_ranks(1, seeds_of, SimpleNamespace(requests={}))
    assert first == [position_seed(7, 0), position_seed(7, 1)]
    (second,) = run_ranks(1, seeds_of, SimpleNamespace())
    assert second == [7, 7]
