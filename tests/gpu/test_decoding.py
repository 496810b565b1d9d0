"""Speed of decoding with CUDA graphs, and with asynchronous scheduling."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import vllm
import yaml

from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.config import load_config
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.sizes import GenSizes
from tests.gpu import one_device
from tests.gpu.one_device import ALONE, BILLIONS, GIB

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

NUM_SEQUENCES, NEW_TOKENS, PROMPT_TOKENS = 256, 256, 32
FASTER = 1.5
"""Least gain of CUDA graphs over eager decoding."""
COMPARED_TOKENS, EQUAL_SHARE = 32, 0.75
"""Least share of responses that have the same first tokens with another schedule: batches of other sizes round
differently."""


@dataclass(frozen=True)
class Decoded:
    tokens: list[list[int]]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def settings_of_a_run(folder: Path, kv_cache_bytes: int) -> EngineSettings:
    """Return the settings of a run on a GPU whose configuration does not mention graphs."""
    sections: dict[str, Any] = {
        "run": {"steps": 1},
        "cluster": {"ranks_per_node": [1], "device": "cuda"},
        "model": {
            "build": {"max_positions": 512},
            "dtype": "bfloat16",
        },  # any: the settings do not depend on it
        "data": {"batch_size": 1, "task": {"name": "arithmetic"}},
        "rollout": {
            "max_prompt_tokens": PROMPT_TOKENS,
            "max_response_tokens": NEW_TOKENS,
            "kv_cache_bytes": kv_cache_bytes,
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return EngineSettings.of(load_config(folder / "run.yaml"))


def decode(
    rank: int,
    folder: Path,
    settings: EngineSettings,
    async_scheduling: bool,
    num_sequences: int,
    num_tokens: int,
) -> Decoded:
    """Draw for all prompts at once; the second of two runs is timed, after graphs and kernels are made."""
    identity, _ = one_device.begin(rank)
    shape = ModelShape.from_folder(folder)
    with mock.patch.object(vllm, "LLM", _with(vllm.LLM, async_scheduling=async_scheduling)):
        engine = VllmEngine(folder, shape, GenerationGrid(ALONE, GenSizes(1, 1)), settings, identity)
    one_device.fill(engine.weights)
    prompts = one_device.make_prompts(num_sequences, PROMPT_TOKENS, shape.vocab_size)
    one_device.draw(engine, prompts, 8, temperature=1.0)
    one_device.synchronize()
    started = time.perf_counter()
    drawn = one_device.draw(engine, prompts, num_tokens, temperature=1.0)
    one_device.synchronize()
    return Decoded([response.token_ids for response in drawn], time.perf_counter() - started)


def _with(build: Callable[..., Any], **forced: Any) -> Callable[..., Any]:
    return lambda **given: build(**{**given, **forced})


def test_graphs_are_on_by_default_and_faster(on_device, folder, note):
    """Passes if 256 responses of 256 tokens of a 1.5B model take the default engine at most two thirds of the eager
    one's time, and if asynchronous scheduling on top draws the same first 32 tokens for three quarters of the prompts:
    with a seed for each position, none would remain if a draw took the seed of another position.

    The gain of asynchronous scheduling is printed, without a bound; it decides whether runs should use it.
    """
    one_device.write_config(folder, **BILLIONS)
    usual = replace(settings_of_a_run(folder, 16 * GIB), max_sequences=NUM_SEQUENCES)
    eager = replace(usual, cuda_graphs=False)
    found: dict[str, Decoded] = {}
    for name, settings, is_async in (
        ("eager", eager, False),
        ("default", usual, False),
        ("default, asynchronous", usual, True),
    ):
        case = folder, settings, is_async, NUM_SEQUENCES, NEW_TOKENS
        [found[name]] = on_device(1, decode, *case)
        note(f"{name}: {found[name].tokens_per_s:,.0f} tokens/s")
        assert all(len(tokens) == NEW_TOKENS for tokens in found[name].tokens)
    assert found["default"].tokens_per_s > FASTER * found["eager"].tokens_per_s
    pairs = zip(found["default"].tokens, found["default, asynchronous"].tokens, strict=True)
    equal = sum(one[:COMPARED_TOKENS] == other[:COMPARED_TOKENS] for one, other in pairs)
    assert equal >= EQUAL_SHARE * NUM_SEQUENCES
