"""Chart of the timelines of plans: one row per pool, one bar per call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from hybridengine.charts import drawing
from hybridengine.formatting import format_seconds
from hybridengine.planning.costs.dataflows import Work
from hybridengine.planning.search.plan import Plan
from hybridengine.planning.search.plan_tables import pool_text

KINDS = {
    Work.SWITCH: ("#D55E00", "switch"),
    Work.GENERATE: ("#56B4E9", "generate"),
    Work.INFER: ("#009E73", "infer"),
    Work.UPDATE: ("#CC79A7", "update"),
    Work.HOST: ("#999999", "prompts, advantages, statistics"),
}
"""Colour and label of each kind of calls."""
LETTER_SHARE = 0.006
"""Width of a letter as a share of the axis; bars too short for their label have none."""


def draw_plans(title: str, plans: Sequence[Plan], file: Path) -> None:
    """Draw the timelines of plans, best first, on a common time axis, to `file`."""
    longest = max(plan.step_s for plan in plans)
    heights = [len(plan.pools) for plan in plans]
    height = 1.5 + 0.42 * sum(heights) + 0.5 * len(plans)
    with drawing(file, title, 11, height) as figure:
        axes = figure.subplots(len(plans), 1, height_ratios=heights, sharex=True, squeeze=False)
        for number, (plan, (own,)) in enumerate(zip(plans, axes, strict=True), start=1):
            _draw(own, number, plan, longest)
        axes[-1][0].set_xlabel("seconds of an iteration, predicted")
        handles = [Patch(color=colour, label=label) for colour, label in KINDS.values()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _draw(axes: Axes, number: int, plan: Plan, longest: float) -> None:
    for bar in plan.bars:
        colour, _ = KINDS[bar.call.work]
        axes.barh(bar.pool, bar.seconds, 0.7, bar.begin_s, color=colour, edgecolor="white", linewidth=0.5)
        if bar.seconds > LETTER_SHARE * longest * len(bar.call.phase):
            middle = (bar.begin_s + bar.end_s) / 2
            axes.text(middle, bar.pool, bar.call.phase, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(plan.pools)), [pool_text(pool) for pool in plan.pools])
    axes.set_xlim(0, longest * 1.01)
    axes.invert_yaxis()
    axes.set_title(f"plan {number}: {format_seconds(plan.step_s)}")
