"""One iteration as a timeline: what each pool does when.

A pool's ranks work through its calls in the order in which the controller makes them; a call begins when its ranks are
free and the calls whose rows it reads have ended. Pools therefore work at the same time wherever the dataflow lets them.
The paper's cost, the sum over stages of the slowest pool's sum (HybridFlow, arXiv 2409.19256, appendix C), is the special
case in which every pool waits for all others between stages.

Where the ranks of a node share its devices, as processes share cores, calls of pools on the same node slow each other
down while they overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridengine.planning.clusters import Cluster, Compute
from hybridengine.planning.dataflows import HELPERS, Call
from hybridengine.planning.passes import compute_of
from hybridengine.planning.placements import Placement
from hybridengine.planning.workload import Workload


@dataclass(frozen=True)
class Bar:
    """A call on the timeline."""

    call: Call
    pool: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Sharing:
    """Pools whose ranks share the devices of nodes.

    A call keeps as many devices busy as its pool has ranks on a node, at most all. Where calls of several pools want more
    than there are, all of them slow down alike.
    """

    compute: Compute
    """Of a device, and how many of a node work at the same time."""
    ranks: tuple[int, ...]
    """Of each pool, on a node."""
    nodes: tuple[int, ...]
    """Of each pool: equal numbers share a node."""

    @classmethod
    def of(cls, cluster: Cluster, num_ranks: Sequence[int]) -> Sharing | None:
        """How pools of so many ranks share devices; None where none does.

        Pools that are parts of a node fill nodes one after the other, the largest first.
        """
        compute, node = compute_of(cluster), cluster.devices_per_node
        if compute.devices_at_once is None or len(num_ranks) == 1:
            return None
        nodes, taken = [0] * len(num_ranks), 0
        for pool in sorted(range(len(num_ranks)), key=lambda pool: -num_ranks[pool]):
            nodes[pool] = taken // node
            taken += num_ranks[pool]
        return cls(compute, tuple(min(node, ranks) for ranks in num_ranks), tuple(nodes))

    def rates(self, pools: Sequence[int]) -> list[float]:
        """Share of the speed that each of these pools has alone, where they work at the same time."""
        found = []
        for pool in pools:
            wanted = sum(self.ranks[other] for other in pools if self.nodes[other] == self.nodes[pool])
            found.append(self.compute.waiting(self.ranks[pool]) / self.compute.waiting(wanted))
        return found


def schedule_of(
    workload: Workload, compute: Compute, placement: Placement, num_ranks: Sequence[int]
) -> Schedule:
    """The calls of a workload on the pools of a placement, which have so many ranks."""
    pool_of = {name: place for place, pool in enumerate(placement) for name in pool}
    calls = workload.calls
    # Helpers and functions are on the actor's ranks.
    pools = [pool_of.get(call.role, 0) for call in calls]
    models = [None if call.role in HELPERS or call.role not in pool_of else call.role for call in calls]
    host_seconds = []
    for call, pool in zip(calls, pools, strict=True):
        figures = getattr(compute.host, call.method, None)
        rows = workload.num_rows(call.count) / num_ranks[pool]
        own = figures.call_s + figures.row_s * rows if figures else 0.0
        host_seconds.append(compute.call_s + own)
    return Schedule(calls, pools, models, host_seconds)


class Schedule:
    """The calls of an iteration on their pools.

    Args:
        pools: of each call.
        models: of each call; None for helpers and functions, which take what `host_seconds` says.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        pools: Sequence[int],
        models: Sequence[str | None],
        host_seconds: Sequence[float],
    ) -> None:
        self._calls, self._pools, self._host_seconds = tuple(calls), tuple(pools), tuple(host_seconds)
        made: dict[str | None, int] = {}
        self._places: list[tuple[str, int] | None] = []
        for model in models:
            self._places.append(None if model is None else (model, made.get(model, 0)))
            made[model] = made.get(model, 0) + 1
        reads = [call.reads for call in self._calls]
        self._steps = list(zip(self._pools, reads, self._places, self._host_seconds, strict=True))

    def step_s(self, seconds: Mapping[str, Sequence[Any]]) -> Any:
        """Seconds of the iteration.

        Args:
            seconds: of each model's calls in their order: numbers, or arrays of equal length for as many timelines.
        """
        if any(isinstance(values[0], np.ndarray) for values in seconds.values() if len(values)):
            return np.maximum.reduce(np.broadcast_arrays(*(end for _, end in self._spans(seconds))))
        # A search asks this a million times.
        free, ends = dict[int, float](), list[float]()
        for pool, reads, place, host_s in self._steps:
            begin = free.get(pool, 0.0)
            for read in reads:
                if ends[read] > begin:
                    begin = ends[read]
            end = begin + (host_s if place is None else seconds[place[0]][place[1]])
            free[pool] = end
            ends.append(end)
        return max(free.values(), default=0.0)

    def bars(self, seconds: Mapping[str, Sequence[float]], sharing: Sharing | None = None) -> list[Bar]:
        """The timeline, in the order of the calls.

        Args:
            seconds: of each model's calls in their order, if no other pool slows them down.
            sharing: what slows them down; nothing, where left out.
        """
        spans = self._spans(seconds) if sharing is None else self._shared_spans(seconds, sharing)
        return [
            Bar(call, pool, *span) for call, pool, span in zip(self._calls, self._pools, spans, strict=True)
        ]

    def _seconds(self, number: int, seconds: Mapping[str, Sequence[Any]]) -> Any:
        place = self._places[number]
        return self._host_seconds[number] if place is None else seconds[place[0]][place[1]]

    def _spans(self, seconds: Mapping[str, Sequence[Any]]) -> list[tuple[Any, Any]]:
        """When each call begins and ends."""
        free: dict[int, Any] = {}
        spans: list[tuple[Any, Any]] = []
        for number, (call, pool) in enumerate(zip(self._calls, self._pools, strict=True)):
            begin = free.get(pool, 0.0)
            for read in call.reads:
                begin = _later(begin, spans[read][1])
            free[pool] = begin + self._seconds(number, seconds)
            spans.append((begin, free[pool]))
        return spans

    def _shared_spans(
        self, seconds: Mapping[str, Sequence[float]], sharing: Sharing
    ) -> list[tuple[float, float]]:
        """When each call begins and ends: from one end of a call to the next, speeds stay as they are."""
        left = [float(self._seconds(number, seconds)) for number in range(len(self._calls))]
        begins, ends, now = dict[int, float](), dict[int, float](), 0.0
        while len(ends) < len(left):
            first = dict[int, int]()  # the next call of each pool
            for number, pool in enumerate(self._pools):
                if number not in ends:
                    first.setdefault(pool, number)
            running = [
                (pool, number)
                for pool, number in first.items()
                if all(read in ends for read in self._calls[number].reads)
            ]
            rates = sharing.rates([pool for pool, _ in running])
            spans = [left[number] / rate for (_, number), rate in zip(running, rates, strict=True)]
            passed = min(spans)
            for (_, number), rate, span in zip(running, rates, spans, strict=True):
                begins.setdefault(number, now)
                left[number] -= passed * rate
                if span == passed:
                    ends[number] = now + passed
            now += passed
        return [(begins[number], ends[number]) for number in range(len(left))]


def _later(one: Any, other: Any) -> Any:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return one if one >= other else other


def phases(bars: Sequence[Bar]) -> Mapping[str, float]:
    """Phase -> its seconds, in order of first appearance."""
    found: dict[str, float] = {}
    for bar in bars:
        found[bar.call.phase] = found.get(bar.call.phase, 0.0) + bar.seconds
    return found
