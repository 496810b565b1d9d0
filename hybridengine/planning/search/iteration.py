"""Timeline of one iteration, with the calls of each pool.

The ranks of a pool carry out its calls in the order in which the controller makes them; a call begins when its ranks are
free and the calls whose rows it reads have ended. Pools therefore work at the same time if the dataflow allows it.
The paper's cost, the sum over stages of the slowest pool's sum (HybridFlow, arXiv 2409.19256, appendix C), is the special
case in which every pool waits for all others between stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from hybridengine.planning.costs.clusters import Compute
from hybridengine.planning.costs.dataflows import HELPERS, Call
from hybridengine.planning.costs.workload import Workload
from hybridengine.planning.search.placements import Placement


@dataclass(frozen=True)
class Bar:
    """Call on the timeline."""

    call: Call
    pool: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def schedule_of(workload: Workload, compute: Compute, placement: Placement) -> Schedule:
    """Return the schedule of a workload on the pools of a placement; helpers and functions use the actor's ranks."""
    pool_of = {name: place for place, pool in enumerate(placement) for name in pool}
    pools = [pool_of.get(call.role, 0) for call in workload.calls]
    models = [
        None if call.role in HELPERS or call.role not in pool_of else call.role for call in workload.calls
    ]
    return Schedule(workload.calls, pools, models, compute.call_s)


class Schedule:
    """Calls of an iteration on their pools.

    Args:
        pools: pool of each call.
        models: model of each call; None for helpers and functions, which take `call_s`.
    """

    def __init__(
        self, calls: Sequence[Call], pools: Sequence[int], models: Sequence[str | None], call_s: float
    ) -> None:
        self._calls, self._pools, self._call_s = tuple(calls), tuple(pools), call_s
        made = Counter[str | None]()
        self._steps: list[tuple[int, list[int], tuple[str, int] | None]] = []
        for call, pool, model in zip(calls, pools, models, strict=True):
            # It suffices to wait for the last call read on each other pool, since a pool's calls end in order.
            last = {pools[read]: read for read in sorted(call.reads) if pools[read] != pool}
            place = None if model is None else (model, made[model])
            made[model] += 1
            self._steps.append((pool, list(last.values()), place))

    def step_s(self, seconds: Mapping[str, Sequence[Any]], later: Callable[[Any, Any], Any] = max) -> Any:
        """Return the seconds of the iteration.

        Args:
            seconds: seconds of each model's calls, in order: numbers, or arrays with one element per timeline.
            later: function that returns the later of two moments; `np.maximum` for arrays.
        """
        return reduce(later, (end for _, end in self._spans(seconds, later)), 0.0)

    def bars(self, seconds: Mapping[str, Sequence[float]]) -> list[Bar]:
        """Return the timeline, in the order of the calls.

        Args:
            seconds: seconds of each model's calls, in order.
        """
        spans = self._spans(seconds)
        return [
            Bar(call, pool, float(begin), float(end))
            for call, pool, (begin, end) in zip(self._calls, self._pools, spans, strict=True)
        ]

    def _spans(
        self, seconds: Mapping[str, Sequence[Any]], later: Callable[[Any, Any], Any] = max
    ) -> list[tuple[Any, Any]]:
        """Return the begin and end of each call."""
        free: dict[int, Any] = dict.fromkeys(self._pools, 0.0)
        spans: list[tuple[Any, Any]] = []
        for pool, reads, place in self._steps:
            begin = free[pool]
            for read in reads:
                begin = later(begin, spans[read][1])
            free[pool] = begin + (self._call_s if place is None else seconds[place[0]][place[1]])
            spans.append((begin, free[pool]))
        return spans


def phases(bars: Sequence[Bar]) -> dict[str, float]:
    """Return the seconds of each phase, in order of first appearance."""
    found: dict[str, float] = {}
    for bar in bars:
        found[bar.call.phase] = found.get(bar.call.phase, 0.0) + bar.seconds
    return found
