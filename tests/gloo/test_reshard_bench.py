"""`hybridengine reshard bench` on real ranks: every method delivers the right weights and moves the reported bytes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService

from hybridengine.bench.reshard.measurement import METHODS, SwitchBenchWorker, measure_pair
from hybridengine.bench.reshard.methods import megatron_core
from hybridengine.bench.reshard.methods.gather_all import Full
from hybridengine.bench.reshard.methods.method import Method
from hybridengine.bench.reshard.methods.micro_dp import MicroDp
from hybridengine.bench.reshard.results import PairResult
from hybridengine.bench.reshard.spec import BenchSpec, LayoutPair, MethodName, methods_for
from hybridengine.errors import ConfigError
from hybridengine.families.sizes import ExpertSizes, LatentSizes
from hybridengine.models.shapes import ModelShape
from hybridengine.rows.protocols import GroupTopology, RankContext
from hybridengine.weights.ledger import SwitchReport
from hybridengine.weights.storage import WeightStorage
from tests.gloo.ranks import RankError, RankLauncher

EVEN = ModelShape(
    family="qwen3",
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=96,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    vocab_size=256,
    max_positions=64,
)
"""Sizes that divide evenly, except for norms, which each tensor-parallel rank holds whole."""
MIXTURES = {
    "qwen3_moe": replace(EVEN, family="qwen3_moe", experts=ExpertSizes(8, 2, 48)),
    "deepseek_v3": replace(
        EVEN,
        family="deepseek_v3",
        num_kv_heads=8,
        experts=ExpertSizes(8, 2, 48, num_dense_layers=1, num_shared=1, num_groups=2, num_active_groups=1),
        head_dim=80,
        latent=LatentSizes(32, 512, 16, 64, 16),
    ),
}
MIXTURE_PAIRS = {
    "2-1-2 e=2:2-1": True,
    "1-2-2 e=2:1-2": True,
    "1-2-2 e=4 etp=1:1-2 e=2": False,
    "1-4-1 e=2 etp=2:1-2": False,
}
"""Layouts, and whether they nest; engines have a half of all experts, of which a rank trains a half."""

GENERAL = ("4-1-1:2-2", "1-4-1:1-4")
NESTED = ("1-2-2:1-1", "2-2-1:1-2")
FORMULAS = {
    # received, peak (of both copies, for methods that keep one), as fractions of M: table 2 of the paper by hand.
    "1-2-2:1-1": {"micro-dp": (1 / 2, 1.0), "model-parallel": (1 / 2, 3 / 2), "full": (3 / 4, 3 / 2)},
    "2-2-1:1-2": {"micro-dp": (1 / 4, 1 / 2), "model-parallel": (3 / 4, 3 / 4), "full": (3 / 4, 3 / 4)},
}


class AllRanks:
    """Stands in for the worker group: every rank calls its own worker, and gets the results of all ranks."""

    def __init__(self, worker: SwitchBenchWorker) -> None:
        self._worker = worker

    def __getattr__(self, method: str) -> Callable[..., SimpleNamespace]:
        def call(*arguments: Any) -> SimpleNamespace:
            returned: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(returned, getattr(self._worker, method)(*arguments))
            return SimpleNamespace(get=lambda: returned, wait=lambda: None)

        return call


def measured(rank: int, spec: BenchSpec) -> list[PairResult]:
    results = []
    for pair in spec.pairs:
        topology = GroupTopology.parse(str(pair.train), str(pair.gen))
        context = RankContext("bench", rank, topology.num_ranks, topology, topology.grid.coordinate(rank), "")
        worker = SwitchBenchWorker(context, spec, pair)
        results.append(measure_pair(spec, pair, AllRanks(worker), lambda text: None))
    return results


def spec_of(*pairs: str, bucket_bytes: int = 2**16, **settings: Any) -> BenchSpec:
    settings = {"repetitions": 2, "timeout_s": 30.0} | settings
    return BenchSpec(EVEN, tuple(map(LayoutPair.parse, pairs)), bucket_bytes=bucket_bytes, **settings)


def test_all_methods_move_what_their_formulas_say(run_ranks: RankLauncher) -> None:
    """The benchmark itself checks the weights on each rank against values of logical indices."""
    whole = spec_of(*NESTED).weight_bytes
    slack = 0.02 * whole  # norms, which no tensor parallelism shards
    for pair in NESTED:
        spec = spec_of(pair, repetitions=1)
        (result,) = run_ranks(spec.pairs[0].train.num_ranks, measured, spec)[0]
        by_name = {entry["method"]: entry for entry in result.results}
        assert set(by_name) == {method.value for method in MethodName}
        for name, (received, peak) in FORMULAS[pair].items():
            entry = by_name[name]
            assert entry["received_bytes_max"] == pytest.approx(received * whole, abs=slack), (pair, name)
            # Buckets, and a buffer of one for methods that gather next to their destination, are added.
            most = peak * whole + 4 * spec.bucket_bytes + slack
            assert peak * whole <= entry["peak_weight_bytes_max"] <= most
        assert by_name["micro-dp"]["redundant_bytes_max"] == 0
        shard = whole / LayoutPair.parse(pair).train.model_parallel_size
        for name in ("model-parallel", "full", "per-tensor", "megatron-core"):
            assert by_name[name]["redundant_bytes_max"] == pytest.approx(shard, abs=slack), (pair, name)
        for entry in result.results:
            assert 0 < entry["seconds_there_min"] <= entry["seconds_there"] <= entry["seconds_there_max"]
            assert entry["received_back_bytes_max"] == 0
        assert result.figures["raw_all_gather_received_bytes"] == pytest.approx(
            FORMULAS[pair]["micro-dp"][0] * whole, abs=slack
        )
        assert result.figures["verify_always_over_never"] > 0


def test_layouts_that_do_not_nest_and_those_that_need_nothing(run_ranks: RankLauncher) -> None:
    results = run_ranks(4, measured, spec_of(*GENERAL, dtype="bfloat16", repetitions=1))[0]
    there_is_none = results[-1]
    assert there_is_none.figures["raw_all_gather_seconds"] is None
    received = {entry["method"]: entry["received_bytes_max"] for entry in there_is_none.results}
    assert received["micro-dp"] == 0


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_of_mixtures_move_beside_the_refit_of_megatron_core(
    family: str, run_ranks: RankLauncher
) -> None:
    """The benchmark itself checks the weights on each rank against values of logical indices."""
    shape = MIXTURES[family]
    pairs = tuple(map(LayoutPair.parse, MIXTURE_PAIRS))
    spec = BenchSpec(shape, pairs, methods_for(shape), repetitions=1, bucket_bytes=2**16, timeout_s=30.0)
    results = run_ranks(4, measured, spec)[0]
    assert shape.experts is not None
    for (text, nests), result in zip(MIXTURE_PAIRS.items(), results, strict=True):
        ours, other = result.results
        assert [ours["method"], other["method"]] == ["micro-dp", "megatron-core"]
        if nests:
            stages = LayoutPair.parse(text).train.pp_size
            layers = min(shape.num_layers - shape.experts.num_dense_layers, shape.num_layers // stages)
            of_layer = 4 * 8 * 3 * 64 * 48  # bytes of eight experts' gates, ups and downs in float32
            assert ours["received_bytes_max"] == layers * of_layer * stages / 4, text
            assert ours["redundant_bytes_max"] == 0
        assert ours["redundant_bytes_max"] < other["redundant_bytes_max"], text
        assert ours["peak_weight_bytes_max"] < other["peak_weight_bytes_max"] / 2, text
        assert ours["received_bytes_over_formula"] is None


def test_methods_that_do_not_know_experts_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"methods model-parallel, full, per-tensor gather .* micro-dp, megatron-core"
    ):
        BenchSpec(MIXTURES["qwen3_moe"], ())


def first_element(weights: WeightStorage) -> torch.Tensor:
    return weights[weights.names[0]].view(-1)[0]


class Damages(Full):
    """A gather that delivers one wrong element to one rank."""

    def move(self) -> int:
        received = super().move()
        if self.actor.rank == 1:
            first_element(self.destination).add_(1)
        return received


class TouchesTraining(MicroDp):
    """A way back that changes an element of the training weights on every rank."""

    def back(self) -> SwitchReport:
        report = super().back()
        first_element(self.actor.weights).add_(1)
        return report


def damaged(rank: int, spec: BenchSpec, name: MethodName, damage: type[Method]) -> None:
    METHODS[name] = damage
    measured(rank, spec)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (MethodName.FULL, Damages, "method full left wrong weights on rank 1"),
        (
            MethodName.MICRO_DP,
            TouchesTraining,
            "method micro-dp, on the way back, left wrong weights on rank 0",
        ),
    ],
)
def test_a_method_that_delivers_wrong_weights_ends_the_benchmark(
    run_ranks: RankLauncher, name: MethodName, damage: type[Method], message: str
) -> None:
    spec = spec_of("1-2-1:1-1", methods=(name,), timeout_s=5.0)
    with pytest.raises(RankError, match=message):
        run_ranks(2, damaged, spec, name, damage)


def measure_with_nccl_service(rank: int, spec: BenchSpec) -> tuple[PairResult, list[str]]:
    """Measure with the service of GPUs, over gloo; return the results, and what its copies' stream did.

    There is no GPU: the stream is a stand-in, and so is the context in which copies are queued on it.
    """

    class Service(NCCLCopyService):
        gloo_pg = property(lambda self: dist.group.WORLD)

    megatron_core.GlooCopyService = Service  # type: ignore[misc]
    seen = list[str]()
    megatron_core._ANSWERS["stream"] = lambda stream: seen.append("copies") or contextlib.nullcontext()
    (pair,) = spec.pairs
    topology = GroupTopology.parse(str(pair.train), str(pair.gen))
    context = RankContext("bench", rank, topology.num_ranks, topology, topology.grid.coordinate(rank), "")
    worker = SwitchBenchWorker(context, spec, pair)
    service = worker._methods[MethodName.MEGATRON_CORE.value]._service  # type: ignore[attr-defined]
    service._copy_stream = SimpleNamespace(wait_stream=lambda other: seen.append("waits"))
    return measure_pair(spec, pair, AllRanks(worker), lambda text: None), seen


def test_the_service_of_gpus_moves_the_same_and_copies_what_is_there(run_ranks: RankLauncher) -> None:
    """The benchmark itself checks the weights. Local copies run on a stream that has waited for their sources."""
    spec = spec_of("1-2-2:1-1", methods=(MethodName.MEGATRON_CORE,))
    by_gloo = run_ranks(4, measured, spec)[0][0].results[0]
    by_nccl = run_ranks(4, measure_with_nccl_service, spec)
    for result, seen in by_nccl:
        for name in ("received_bytes_max", "redundant_bytes_max"):
            assert result.results[0][name] == by_gloo[name] > 0
        assert re.fullmatch(rf"(waits(copies)*){{{1 + spec.repetitions}}}", "".join(seen)), seen
    assert any("copies" in seen for _, seen in by_nccl)
