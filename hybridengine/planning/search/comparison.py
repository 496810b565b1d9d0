"""Comparison of plans by their longest paths and the idle time of their pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridengine.planning.search.iteration import Bar, phases
from hybridengine.planning.search.plan import Plan

SHOWN_SHARE = 0.005
"""Share of the step below which differences are omitted."""


@dataclass(frozen=True)
class Difference:
    """Difference of one phase between another plan and the best one."""

    phase: str
    seconds: float
    """Seconds on the other plan's longest path minus those on the best one's."""
    own: str
    """Sizes and ranks of the other plan, e.g. "1-8-8 on 64"; empty if the phase is not on its longest path."""
    best: str
    """Sizes and ranks of the best plan, in the same form."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of another plan with the best one."""

    seconds: float
    """Seconds by which its step is longer: the sum of all differences, including those too small to show."""
    differences: tuple[Difference, ...]
    """Differences by phase, the largest first."""


def longest_path(bars: Sequence[Bar]) -> list[Bar]:
    """Return the calls on the longest path of the iteration, in order: each begins when the previous one ends."""
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
    """Return, for each pool, the share of the step in which its ranks are idle."""
    busy = [sum(bar.seconds for bar in plan.bars if bar.pool == pool) for pool in range(len(plan.pools))]
    return tuple(1 - seconds / plan.step_s for seconds in busy)


def compare(other: Plan, best: Plan) -> Comparison:
    """Return the differences that make `other` slower than `best`."""
    own, there = _path_seconds(other), _path_seconds(best)
    found = [
        Difference(
            phase,
            own.get(phase, 0.0) - there.get(phase, 0.0),
            _with(other, phase) if phase in own else "",
            _with(best, phase) if phase in there else "",
        )
        for phase in own | there
    ]
    shown = [one for one in found if abs(one.seconds) >= SHOWN_SHARE * best.step_s]
    shown.sort(key=lambda one: -abs(one.seconds))
    return Comparison(other.step_s - best.step_s, tuple(shown))


def _path_seconds(plan: Plan) -> dict[str, float]:
    return phases(longest_path(plan.bars))


def _with(plan: Plan, phase: str) -> str:
    """Return the sizes and ranks of the first model that works in a phase."""
    role = next(bar.call.role for bar in plan.bars if bar.call.phase == phase)
    found = ((pool, option) for pool in plan.pools for option in pool.options if option.model == role)
    for pool, option in found:
        sizes = option.engine.sizes if phase == "generate" and option.engine else option.sizes
        return f"{sizes} on {pool.num_ranks}"
    return "no model"
