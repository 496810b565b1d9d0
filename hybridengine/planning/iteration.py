"""One iteration as a timeline: what each pool does when.

A pool's ranks work through its calls in the order in which the controller makes them; a call begins when its ranks are
free and the calls whose rows it reads have ended. Pools therefore work at the same time wherever the dataflow lets them.
The paper's cost, the sum over stages of the slowest pool's sum (HybridFlow, arXiv 2409.19256, appendix C), is the special
case in which every pool waits for all others between stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridengine.planning.clusters import Compute
from hybridengine.planning.dataflows import HELPERS, Call
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

    def step_s(self, seconds: Mapping[str, Sequence[Any]]) -> Any:
        """Seconds of the iteration.

        Args:
            seconds: of each model's calls in their order: numbers, or arrays of equal length for as many timelines.
        """
        spans = self._spans(seconds)
        last = spans[0][1]
        for _, end in spans[1:]:
            last = _later(last, end)
        return last

    def bars(self, seconds: Mapping[str, Sequence[float]]) -> list[Bar]:
        """The timeline, in the order of the calls."""
        spans = self._spans(seconds)
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
