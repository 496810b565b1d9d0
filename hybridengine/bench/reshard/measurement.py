"""Measurement of switches on real ranks: all methods in turn on the same weights, in every repetition."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.vllm.environment import rank_environment
from hybridengine.bench.machine import num_gpus
from hybridengine.bench.reshard.actor import Actor
from hybridengine.bench.reshard.methods import METHODS
from hybridengine.bench.reshard.methods.method import Setting
from hybridengine.bench.reshard.results import PairResult, Sample, summarise
from hybridengine.bench.reshard.spec import BenchSpec, LayoutPair
from hybridengine.controller.cluster import start_ray
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.formatting import format_seconds
from hybridengine.reshard.domains import domains
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.rows.protocols import ONE_TO_ALL, RankContext, register
from hybridengine.topology.grid import group_with
from hybridengine.weights.process_groups import ProcessGroups

Say = Callable[[str], None]
Result = TypeVar("Result")


def measure_switches(spec: BenchSpec, say: Say) -> Iterator[PairResult]:
    """Yield the results of each pair of layouts, measured on ranks that are started for it.

    Raises:
        ConfigError: the cluster is too small.
        RankFailedError: a method delivered wrong weights, or a rank failed.
        WorkerTimeoutError: a call took longer than `spec.timeout_s`.
    """
    on_gpus = num_gpus() > 0
    start_ray(num_cpus=max(pair.train.num_ranks for pair in spec.pairs))
    for pair in spec.pairs:
        say(f"{spec.describe(pair)}; starting ranks")
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
    """Return the results of one pair.

    Args:
        ranks: worker group of `SwitchBenchWorker`.
    """
    for version, label in enumerate(spec.contestants, start=1):
        say(f"warming up and checking {label}")
        ranks.check(label, version).wait()
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
        setting = Setting(actor, pair.gen, spec.bucket_bytes, spec.verify, spec.timeout_s, spec.nodes(pair))
        self._methods = {
            label: METHODS[name](replace(setting, verify=verify))
            for label, (name, verify) in spec.contestants.items()
        }
        for method in self._methods.values():
            method.prepare()
        # The reference is a bare all-gather of training shards in the micro-DP group, into memory already touched.
        groups = domains(actor.layout, vllm_layout(spec.shape, generation))
        self._domain, self._group = group_with(actor.rank, groups), registry.of(groups)
        size = max(actor.layout.shard(rank).num_elements for rank in self._domain)
        self._own = torch.zeros(size, dtype=actor.dtype, device=actor.device)
        self._gathered = torch.zeros(size * len(self._domain), dtype=actor.dtype, device=actor.device)

    @register(ONE_TO_ALL)
    def check(self, label: str, version: int) -> None:
        """Warm up a method with the weights of `version`, and check the delivered weights.

        Raises:
            TransferError: it delivered wrong weights, or changed the training weights.
        """
        self._actor.fill(version)
        self._repeat(label, checks=True)

    @register(ONE_TO_ALL)
    def repeat(self, label: str) -> Sample:
        """Switch to generation and back by one method, then all-gather the bare shards."""
        return self._repeat(label)

    def _repeat(self, label: str, checks: bool = False) -> Sample:
        method = self._methods[label]
        seconds_there, there = timed(method.there)
        if checks:
            method.check(label)
        seconds_back, back = timed(method.back)
        if checks:
            self._actor.check(f"method {label}, on the way back,")
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


def timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds of `call` on this rank from a common start, without garbage collection, and its result."""
    dist.barrier()
    gc.disable()
    try:
        _wait_for_device()
        started = time.perf_counter()
        result = call()
        _wait_for_device()
        return time.perf_counter() - started, result
    finally:
        gc.enable()


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
