"""Timelines of plans as a picture: a row for each pool, a bar for each call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from hybridengine.cli.chart_style import STYLE
from hybridengine.cli.plan_tables import pool_text
from hybridengine.metrics.formatting import format_seconds
from hybridengine.planning.dataflows import Work
from hybridengine.planning.plan import Plan

COLOURS = {
    Work.SWITCH: "#D55E00",
    Work.GENERATE: "#56B4E9",
    Work.INFER: "#009E73",
    Work.UPDATE: "#CC79A7",
    Work.HOST: "#999999",
}
NAMES = {
    Work.SWITCH: "switch",
    Work.GENERATE: "generate",
    Work.INFER: "infer",
    Work.UPDATE: "update",
    Work.HOST: "prompts, advantages, statistics",
}
LETTER_SHARE = 0.006
"""Of the axis, that a letter of a label takes; bars without room for it have none."""


def draw_plans(title: str, plans: Sequence[Plan], file: Path) -> None:
    """Draw the timelines of plans, best first and on one axis of time, into `file`."""
    longest = max(plan.step_s for plan in plans)
    heights = [len(plan.pools) for plan in plans]
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            len(plans),
            1,
            figsize=(11, 1.5 + 0.42 * sum(heights) + 0.5 * len(plans)),
            layout="constrained",
            height_ratios=heights,
            sharex=True,
            squeeze=False,
        )
        for number, (plan, (own,)) in enumerate(zip(plans, axes, strict=True), start=1):
            _draw(own, number, plan, longest)
        axes[-1][0].set_xlabel("seconds of an iteration, predicted")
        handles = [Patch(color=COLOURS[work], label=NAMES[work]) for work in COLOURS]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        figure.suptitle(title, fontsize=10, parse_math=False)
        figure.savefig(file, dpi=130, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        pyplot.close(figure)


def _draw(axes: Axes, number: int, plan: Plan, longest: float) -> None:
    for bar in plan.bars:
        axes.barh(
            bar.pool,
            bar.seconds,
            left=bar.begin_s,
            height=0.7,
            color=COLOURS[bar.call.work],
            edgecolor="white",
            linewidth=0.5,
        )
        if bar.seconds > LETTER_SHARE * longest * len(bar.call.phase):
            axes.text(
                (bar.begin_s + bar.end_s) / 2, bar.pool, bar.call.phase, ha="center", va="center", fontsize=7
            )
    axes.set_yticks(range(len(plan.pools)), [pool_text(pool) for pool in plan.pools])
    axes.set_xlim(0, longest * 1.01)
    axes.invert_yaxis()
    axes.set_title(f"plan {number}: {format_seconds(plan.step_s)}", loc="left", fontsize=9)
