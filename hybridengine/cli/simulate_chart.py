"""Simulated runs as pictures: who works when, the queue, how old the data gets, and a sweep of divisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from hybridengine.cli.chart_style import STYLE
from hybridengine.planning.scenarios import Run, Split
from hybridengine.planning.simulation import Outcome

BUSY, IDLE, OTHER, INK = "#56B4E9", "#DDDDDD", "#D55E00", "#333333"


def draw_runs(
    title: str,
    outcomes: Mapping[str, Outcome],
    sweep: Sequence[tuple[Split, Run, Outcome]],
    max_staleness: float,
    file: Path,
) -> None:
    """Draw what runs do with their time, the last one's queue and staleness, and a sweep where there is one."""
    rows = 2 if len(sweep) > 1 else 1
    with matplotlib.rc_context(STYLE):
        figure = pyplot.figure(figsize=(11, 3.6 * rows), layout="constrained")
        grid = figure.add_gridspec(rows, 6)
        _draw_use(figure.add_subplot(grid[0, 0:2]), outcomes)
        last = list(outcomes.values())[-1]
        _draw_queue(figure.add_subplot(grid[0, 2:4]), last)
        _draw_staleness(figure.add_subplot(grid[0, 4:6]), last)
        if rows == 2:
            _draw_rates(figure.add_subplot(grid[1, 0:3]), outcomes, sweep)
            _draw_ages(figure.add_subplot(grid[1, 3:6]), sweep, max_staleness)
        figure.suptitle(title, fontsize=10, parse_math=False)
        figure.savefig(file, dpi=130, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        pyplot.close(figure)


def _draw_use(axes: Axes, outcomes: Mapping[str, Outcome]) -> None:
    names, busy = [], []
    for name, outcome in outcomes.items():
        names += [f"{name}: trainer", f"{name}: engines"]
        busy += [1 - outcome.train_idle_share, 1 - outcome.generate_idle_share]
    places = range(len(names))
    axes.barh(places, [100 * share for share in busy], color=BUSY, label="works")
    rest = [100 * (1 - share) for share in busy]
    axes.barh(places, rest, left=[100 * share for share in busy], color=IDLE, label="idle")
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.set_xlabel("% of the run")
    axes.set_title("use of each side", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=7, loc="lower right", bbox_to_anchor=(1, 0.99), ncols=2)


def _draw_queue(axes: Axes, outcome: Outcome) -> None:
    moments, counts = zip(*outcome.queue, strict=True)
    axes.step(moments, counts, where="post", color=INK, linewidth=0.6)
    axes.set_xlabel("seconds")
    axes.set_ylabel("complete responses")
    axes.set_ylim(bottom=0)
    axes.set_title("queue of the asynchronous run", loc="left", fontsize=9)


def _draw_staleness(axes: Axes, outcome: Outcome) -> None:
    ages = sorted(outcome.staleness_counts)
    axes.bar(ages, [100 * outcome.staleness_counts[age] / outcome.tokens for age in ages], color=BUSY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("steps from a token to its training")
    axes.set_ylabel("% of tokens")
    axes.set_title("staleness of the asynchronous run", loc="left", fontsize=9)


def _draw_rates(
    axes: Axes, outcomes: Mapping[str, Outcome], sweep: Sequence[tuple[Split, Run, Outcome]]
) -> None:
    devices = [split.num_training for split, _, _ in sweep]
    axes.plot(devices, [split.tokens_per_s for split, _, _ in sweep], color=INK, label="analytical model")
    axes.plot(devices, [outcome.tokens_per_s for _, _, outcome in sweep], "o", color=BUSY, label="simulated")
    if "synchronous" in outcomes:
        axes.axhline(outcomes["synchronous"].tokens_per_s, color=OTHER, linestyle="--", label="synchronous")
    axes.set_xlabel("devices that train")
    axes.set_ylabel("tokens of responses a second")
    axes.set_ylim(bottom=0)
    axes.set_title("throughput of each division", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=7)


def _draw_ages(axes: Axes, sweep: Sequence[tuple[Split, Run, Outcome]], max_staleness: float) -> None:
    devices = [split.num_training for split, _, _ in sweep]
    axes.plot(
        devices,
        [split.staleness for split, _, _ in sweep],
        color=INK,
        label="while generated, at most: model",
    )
    axes.plot(
        devices,
        [outcome.largest_staleness for _, _, outcome in sweep],
        "o",
        color=BUSY,
        label="most, simulated",
    )
    axes.plot(
        devices, [outcome.mean_staleness for _, _, outcome in sweep], "x", color=INK, label="mean, simulated"
    )
    if max_staleness != float("inf"):
        axes.axhline(max_staleness, color=OTHER, linestyle="--", label="bound")
    axes.set_xlabel("devices that train")
    axes.set_ylabel("optimizer steps")
    axes.set_ylim(bottom=0)
    axes.set_title("staleness of each division", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=7)
