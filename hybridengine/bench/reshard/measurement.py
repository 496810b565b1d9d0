"""Measurement of switches on real ranks: all methods in turn on the same weights, in every repetition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.vllm.environment import rank_environment
from hybridengine.bench.reshard.actor import Actor, differing_parameters
from hybridengine.bench.reshard.methods.gather_all import Full, ModelParallel
from hybridengine.bench.reshard.methods.megatron_core import MegatronCore
from hybridengine.bench.reshard.methods.method import Method
from hybridengine.bench.reshard.methods.micro_dp import MicroDp
from hybridengine.bench.reshard.methods.per_tensor import PerTensor
from hybridengine.bench.reshard.results import PairResult, Sample, summarise
from hybridengine.bench.reshard.spec import BenchSpec, LayoutPair, MethodName
from hybridengine.controller.cluster import node_offers, start_ray
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.errors import TransferError
from hybridengine.formatting import format_bytes, format_seconds
from hybridengine.machine import wait_for_device, without_garbage_collection
from hybridengine.reshard.domains import domains
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.rows.protocols import ONE_TO_ALL, RankContext, register
from hybridengine.topology.grid import group_with
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import WeightStorage

METHODS: dict[MethodName, type[Method]] = {
    MethodName.MICRO_DP: MicroDp,
    MethodName.MODEL_PARALLEL: ModelParallel,
    MethodName.FULL: Full,
    MethodName.PER_TENSOR: PerTensor,
    MethodName.MEGATRON_CORE: MegatronCore,
}
Say = Callable[[str], None]
Result = TypeVar("Result")


def measure_switches(spec: BenchSpec, say: Say) -> Iterator[PairResult]:
    """Yield the results of each pair of layouts, measured on ranks that are started for it.

    Raises:
        ConfigError: the cluster is too small.
        RankFailedError: a method delivered wrong weights, or a rank failed.
        WorkerTimeoutError: a call took longer than `spec.timeout_s`.
    """
    start_ray(num_cpus=max(pair.train.num_ranks for pair in spec.pairs))
    on_gpus = any(offer.num_gpus for offer in node_offers())
    for pair in spec.pairs:
        weights = f"{format_bytes(spec.weight_bytes)} of {spec.dtype} weights"
        say(f"{pair}: starting {pair.train.num_ranks} ranks, {weights}")
        with ResourcePool(
            spec.nodes(pair).ranks_per_node,
            use_gpus=on_gpus,
            env=rank_environment(use_gpus=on_gpus),
            timeout_s=spec.timeout_s,
        ) as pool:
            ranks = WorkerGroup(
                pool,
                SwitchBenchWorker,
                parallel=pair.train,
                generate=pair.gen,
                config={"spec": spec, "pair": pair},
            )
            result = measure_pair(spec, pair, ranks, say)
        yield result


def measure_pair(spec: BenchSpec, pair: LayoutPair, ranks: Any, say: Say) -> PairResult:
    """Return the results of one pair, measured by a worker group of `SwitchBenchWorker`."""
    for version, label in enumerate(spec.contestants, start=1):
        say(f"warming up and checking {label}")
        ranks.repeat(label, version).wait()
    say("weights of every method are right")
    samples: dict[str, list[list[Sample]]] = {label: [] for label in spec.contestants}
    for repetition in range(spec.repetitions):
        for label, measured in samples.items():
            measured.append(ranks.repeat(label).get())
        shown = (
            f"{label} {format_seconds(max(sample.seconds_there for sample in measured[-1]))}"
            for label, measured in samples.items()
        )
        say(f"repetition {repetition + 1}/{spec.repetitions}: {', '.join(shown)}")
    return summarise(spec, pair, samples)


class SwitchBenchWorker:
    """Worker that runs all methods on one pair of layouts, on one rank. Calls are collective over all ranks."""

    def __init__(self, context: RankContext, spec: BenchSpec, pair: LayoutPair) -> None:
        initialize_globals(seed=0)
        grid, generation = context.topology.grid, context.topology.generation
        assert generation is not None, "the group is made with generation sizes"
        registry = ProcessGroups(spec.timeout_s)
        self._actor = actor = Actor(spec.shape, grid, context.rank, registry, spec.dtype)
        self._methods = {
            label: METHODS[name](actor, spec, pair, verify)
            for label, (name, verify) in spec.contestants.items()
        }
        # The reference is a bare all-gather of training shards in the micro-DP group, into memory already touched.
        groups = domains(actor.layout, vllm_layout(spec.shape, generation))
        self._domain, self._group = group_with(actor.rank, groups), registry.of(groups)
        size = max(actor.layout.shard(rank).num_elements for rank in self._domain)
        self._own = torch.zeros(size, dtype=actor.dtype, device=actor.device)
        self._gathered = torch.zeros(size * len(self._domain), dtype=actor.dtype, device=actor.device)

    @register(ONE_TO_ALL)
    def repeat(self, label: str, version: int | None = None) -> Sample:
        """Switch there and back, then all-gather the bare shards; verify the weights of `version` (TransferError)."""
        method = self._methods[label]
        if version is not None:
            self._actor.fill(version)
        seconds_there, there = timed(method.there)
        if version is not None:
            self._check(method.layout, method.destination, f"method {label}")
        seconds_back, back = timed(method.back)
        if version is not None:
            self._check(self._actor.layout, self._actor.weights, f"method {label}, on the way back,")
        seconds_raw, _ = timed(
            lambda: dist.all_gather_into_tensor(self._gathered, self._own, group=self._group)
        )
        return Sample(
            seconds_there,
            seconds_back,
            seconds_raw,
            there.received_bytes,
            back.received_bytes,
            max(there.peak_weight_bytes, back.peak_weight_bytes),
            there.redundant_bytes,
            (len(self._domain) - 1) * self._own.nbytes,
        )

    def _check(self, layout: Layout, weights: WeightStorage, after: str) -> None:
        wrong = differing_parameters(layout.shard(self._actor.rank), weights, self._actor.version)
        if wrong:
            shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            raise TransferError(
                f"{after} left wrong weights on rank {self._actor.rank} in {layout.kind}: {shown} differ from the values"
                " of the logical tensors; no timing of it counts"
            )


def timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds of `call` on this rank from a common start, without garbage collection, and its result."""
    dist.barrier()
    with without_garbage_collection():
        wait_for_device()
        started = time.perf_counter()
        result = call()
        wait_for_device()
        return time.perf_counter() - started, result
