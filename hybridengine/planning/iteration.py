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

from hybridengine.planning.dataflows import Call


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


class Schedule:
    """The calls of an iteration on their pools.

    Args:
        pools: of each call.
        models: of each call; None for helpers and functions, which take `host_s`.
    """

    def __init__(
        self, calls: Sequence[Call], pools: Sequence[int], models: Sequence[str | None], host_s: float
    ) -> None:
        self._calls, self._pools, self._host_s = tuple(calls), tuple(pools), host_s
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
        ends = self._ends(seconds)
        last = ends[0]
        for end in ends[1:]:
            last = _later(last, end)
        return last

    def bars(self, seconds: Mapping[str, Sequence[float]]) -> list[Bar]:
        """The timeline, in the order of the calls."""
        return [
            Bar(call, pool, end - self._seconds(place, seconds), end)
            for call, pool, place, end in zip(
                self._calls, self._pools, self._places, self._ends(seconds), strict=True
            )
        ]

    def _seconds(self, place: tuple[str, int] | None, seconds: Mapping[str, Sequence[Any]]) -> Any:
        return self._host_s if place is None else seconds[place[0]][place[1]]

    def _ends(self, seconds: Mapping[str, Sequence[Any]]) -> list[Any]:
        free: dict[int, Any] = {}
        ends: list[Any] = []
        for call, pool, place in zip(self._calls, self._pools, self._places, strict=True):
            begin = free.get(pool, 0.0)
            for read in call.reads:
                begin = _later(begin, ends[read])
            ends.append(begin + self._seconds(place, seconds))
            free[pool] = ends[-1]
        return ends


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
