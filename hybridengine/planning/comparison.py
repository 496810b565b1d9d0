"""Why one plan is slower than another: what lies on its longest path, and what its pools wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridengine.planning.iteration import Bar
from hybridengine.planning.plan import Plan

SHOWN_SHARE = 0.005
"""Of the step; smaller differences are left out."""


@dataclass(frozen=True)
class Difference:
    """Of one phase."""

    phase: str
    seconds: float
    """On the other plan's longest path beyond those on the best one's."""
    own: str
    """What the other plan does it with, e.g. "1-8-8 on 64"; empty where it is not on that path."""
    best: str


@dataclass(frozen=True)
class Comparison:
    """The other plan against the best one."""

    seconds: float
    """That its step takes longer: the sum of the differences, those included that are too small to be shown."""
    differences: tuple[Difference, ...]
    """The largest first."""


def longest_path(bars: Sequence[Bar]) -> list[Bar]:
    """The calls that the iteration's end waits for, first to last: each begins as the one before ends."""
    path = [max(bars, key=lambda bar: bar.end_s)]
    while path[-1].begin_s > 0:
        last = path[-1]
        ended = [bar for bar in bars[: bars.index(last)] if bar.end_s == last.begin_s]
        reads = [bars[place] for place in last.call.reads]
        path.append(
            next((bar for bar in reversed(ended) if bar.pool == last.pool or bar in reads), ended[-1])
        )
    return path[::-1]


def idle_shares(plan: Plan) -> tuple[float, ...]:
    """Of each pool: share of the step in which its ranks have nothing to do."""
    busy = [sum(bar.seconds for bar in plan.bars if bar.pool == pool) for pool in range(len(plan.pools))]
    return tuple(1 - seconds / plan.step_s for seconds in busy)


def compare(other: Plan, best: Plan) -> Comparison:
    """What makes `other` slower than `best`."""
    sides = [_path_seconds(plan) for plan in (other, best)]
    found = []
    for phase in dict.fromkeys([*sides[0], *sides[1]]):
        own, there = (side.get(phase, 0.0) for side in sides)
        if abs(own - there) >= SHOWN_SHARE * best.step_s:
            found.append(
                Difference(
                    phase,
                    own - there,
                    _with(other, phase) if own else "",
                    _with(best, phase) if there else "",
                )
            )
    found.sort(key=lambda one: -abs(one.seconds))
    return Comparison(other.step_s - best.step_s, tuple(found))


def _path_seconds(plan: Plan) -> dict[str, float]:
    found: dict[str, float] = {}
    for bar in longest_path(plan.bars):
        found[bar.call.phase] = found.get(bar.call.phase, 0.0) + bar.seconds
    return found


def _with(plan: Plan, phase: str) -> str:
    """Sizes and ranks of the first model that works in a phase."""
    role = next(bar.call.role for bar in plan.bars if bar.call.phase == phase)
    for pool in plan.pools:
        for option in pool.options:
            if option.model == role:
                sizes = option.engine.sizes if phase == "generate" and option.engine else option.sizes
                return f"{sizes} on {pool.num_ranks}"
    return "no model"
