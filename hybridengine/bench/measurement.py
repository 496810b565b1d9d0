"""One rank's part of a benchmark: all methods in turn on the same weights, repetition by repetition."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.bench.actor import Actor
from hybridengine.bench.methods import METHODS
from hybridengine.bench.methods.method import Method, Setting
from hybridengine.bench.results import PairResult, RankSamples, RawAllGather, Timing, summarise
from hybridengine.bench.spec import BenchSpec, LayoutPair, MethodName
from hybridengine.errors import TransferError
from hybridengine.metrics.formatting import format_seconds
from hybridengine.reshard.domains import domains
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.runtime.ledger import SwitchReport
from hybridengine.runtime.process_groups import ProcessGroups
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid, group_with
from hybridengine.topology.links import NodeMap

Say = Callable[[str], None]

VERIFY_PRICES = ("always", "never")
Result = TypeVar("Result")


@dataclass
class _Contestant:
    """A method in the running, and what this rank has measured of it."""

    label: str
    method: Method
    there: list[tuple[float, SwitchReport]] = field(default_factory=list)
    back: list[tuple[float, SwitchReport]] = field(default_factory=list)

    def samples(self) -> RankSamples:
        """Everything but the first repetition, which warms up."""
        there, back = self.there[1:], self.back[1:]
        return RankSamples(
            seconds_there=tuple(seconds for seconds, _ in there),
            seconds_back=tuple(seconds for seconds, _ in back),
            received_bytes=max(report.received_bytes for _, report in there),
            received_back_bytes=max(report.received_bytes for _, report in back),
            peak_weight_bytes=max(report.peak_weight_bytes for _, report in (*there, *back)),
            redundant_bytes=max(report.redundant_bytes for _, report in there),
        )


class Measurement:
    """All methods of a benchmark on one pair of layouts, on this rank. Every call is collective over all ranks."""

    def __init__(
        self,
        spec: BenchSpec,
        pair: LayoutPair,
        registry: ProcessGroups,
        say: Say,
        nodes: NodeMap | None = None,
    ) -> None:
        self._spec, self._pair, self._say = spec, pair, say
        initialize_globals(seed=0)
        grid = Grid(pair.train)
        self._actor = Actor(spec.shape, grid, dist.get_rank(), registry, spec.dtype)
        setting = Setting(self._actor, pair.gen, spec.bucket_bytes, spec.verify, spec.timeout_s, nodes)
        self._contestants: dict[str, _Contestant] = {}
        for name in spec.methods:
            self._add(name.value, name, setting)
        if MethodName.MICRO_DP in spec.methods:
            for verify in VERIFY_PRICES:
                self._add(
                    f"micro-dp (verify: {verify})", MethodName.MICRO_DP, replace(setting, verify=verify)
                )
        self._raw = _RawGather(self._actor, GenerationGrid(grid, pair.gen))

    def _add(self, label: str, name: MethodName, setting: Setting) -> None:
        method = METHODS[name](setting)
        method.prepare()
        self._contestants[label] = _Contestant(label, method)

    def run(self) -> PairResult:
        """Results over all ranks, the same on each.

        Raises:
            TransferError: a method has delivered wrong weights, or a peer failed.
        """
        started = time.perf_counter()
        self._warm_up()
        self._say(
            f"warm-up took {format_seconds(time.perf_counter() - started)}; weights of every method are right"
        )
        with _without_garbage_collection():
            for repetition in range(self._spec.repetitions):
                self._repeat(repetition)
        result = self._summarise()
        for contestant in self._contestants.values():
            contestant.method.close()
        return result

    def _repeat(self, repetition: int) -> None:
        shown = []
        for contestant in self._contestants.values():
            self._there(contestant)
            self._back(contestant)
            shown.append(f"{contestant.label} {format_seconds(contestant.there[-1][0])}")
            self._raw.run()  # after each, so that what one leaves behind weighs no more than the others'
        self._say(f"repetition {repetition + 1}/{self._spec.repetitions}: {', '.join(shown)}")

    def _warm_up(self) -> None:
        """One repetition that is not counted, in which everything that has been delivered is checked."""
        for version, contestant in enumerate(self._contestants.values(), start=1):
            self._say(f"warming up and checking {contestant.label}")
            self._actor.fill(version)
            self._there(contestant)
            contestant.method.check(contestant.label)
            self._back(contestant)
            self._actor.check(f"method {contestant.label}, on the way back,")
        self._raw.run()

    def _there(self, contestant: _Contestant) -> None:
        contestant.there.append(timed(contestant.method.there))

    def _back(self, contestant: _Contestant) -> None:
        contestant.back.append(timed(contestant.method.back))

    def _summarise(self) -> PairResult:
        own = {label: contestant.samples() for label, contestant in self._contestants.items()}
        everything: list[tuple[dict[str, RankSamples], list[float]]] = [({}, [])] * dist.get_world_size()
        dist.all_gather_object(everything, (own, self._raw.seconds[1:]))
        by_label = {label: [ranks[label] for ranks, _ in everything] for label in own}
        raw = None
        if self._raw.received_bytes:
            raw = RawAllGather(self._raw.received_bytes, Timing.of([seconds for _, seconds in everything]))

        def ratio(label: str, other: str) -> float | None:
            if not {label, other} <= set(by_label):
                return None
            above, below = (
                Timing.of([s.seconds_there for s in by_label[key]]).median for key in (label, other)
            )
            return above / below

        always, never = (f"micro-dp (verify: {verify})" for verify in VERIFY_PRICES)
        return summarise(
            self._spec,
            self._pair,
            {name: by_label[name.value] for name in self._spec.methods},
            raw,
            verify_always_over_never=ratio(always, never),
        )


class _RawGather:
    """The yardstick: a bare all-gather of training shards where micro-dp gathers, into memory that was touched."""

    def __init__(self, actor: Actor, generation: GenerationGrid) -> None:
        groups = domains(actor.layout, vllm_layout(actor.shape, generation))
        self._group = actor.registry.of(groups)
        domain = group_with(actor.rank, groups)
        size = max(actor.layout.shard(rank).num_elements for rank in domain)
        device = next(actor.module.parameters()).device
        self._own = torch.zeros(size, dtype=actor.dtype, device=device)
        self._gathered = torch.zeros(size * len(domain), dtype=actor.dtype, device=device)
        self.received_bytes = (len(domain) - 1) * self._own.nbytes
        """Of the group of this rank; the same in all groups but for uneven stages."""
        largest = torch.tensor([self.received_bytes], device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        self.received_bytes = int(largest.item())
        self.seconds: list[float] = []

    def run(self) -> None:
        """Gather once and note the seconds, where there is anything to gather."""
        if not self.received_bytes:
            return
        seconds, _ = timed(lambda: dist.all_gather_into_tensor(self._gathered, self._own, group=self._group))
        self.seconds.append(seconds)


def timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """(seconds on this rank from a common start, what `call` returns).

    Raises:
        TransferError: a peer failed before or in the call.
    """
    try:
        dist.barrier()
        _wait_for_device()
        started = time.perf_counter()
        result = call()
        _wait_for_device()
        return time.perf_counter() - started, result
    except RuntimeError as error:
        raise TransferError(
            f"rank {dist.get_rank()}: a collective failed: {error}; look for the first error among the ranks"
        ) from error


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Python collects nothing while this is open: it would do so in the middle of any method."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
