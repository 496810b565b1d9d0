"""Charts of simulated runs: use of the devices, queue, staleness and a sweep of divisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from hybridengine.charts import INK, drawing, panel
from hybridengine.planning.simulation.scenarios import Run, SteadyState
from hybridengine.planning.simulation.simulation import Outcome

BUSY, IDLE, OTHER = "#56B4E9", "#DDDDDD", "#D55E00"


def draw_runs(
    title: str,
    outcomes: Mapping[str, Outcome],
    sweep: Sequence[tuple[Run, SteadyState, Outcome]],
    max_staleness: float,
    file: Path,
) -> None:
    """Draw the use of time in all runs, the queue and staleness of the last one, and the sweep, if any."""
    rows = 2 if len(sweep) > 1 else 1
    with drawing(file, title, 11, 3.6 * rows) as figure:
        grid = figure.add_gridspec(rows, 6)
        _draw_use(figure.add_subplot(grid[0, 0:2]), outcomes)
        last = list(outcomes.values())[-1]
        _draw_queue(figure.add_subplot(grid[0, 2:4]), last)
        _draw_staleness(figure.add_subplot(grid[0, 4:6]), last)
        if rows == 2:
            _draw_rates(figure.add_subplot(grid[1, 0:3]), outcomes, sweep)
            _draw_ages(figure.add_subplot(grid[1, 3:6]), sweep, max_staleness)


def _draw_use(axes: Axes, outcomes: Mapping[str, Outcome]) -> None:
    idle: dict[str, float] = {}
    for name, outcome in outcomes.items():
        idle[f"{name}: trainer"] = 100 * outcome.train_idle_share
        idle[f"{name}: engines"] = 100 * outcome.generate_idle_share
    works = [100 - share for share in idle.values()]
    axes.barh(list(idle), works, color=BUSY, label="works")
    axes.barh(list(idle), list(idle.values()), left=works, color=IDLE, label="idle")
    axes.invert_yaxis()
    panel(axes, "use of each side", "% of the run")
    axes.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1, 0.99), ncols=2)


def _draw_queue(axes: Axes, outcome: Outcome) -> None:
    moments, counts = zip(*outcome.queue, strict=True)
    axes.step(moments, counts, where="post", color=INK, linewidth=0.6)
    panel(axes, "queue of the asynchronous run", "seconds", "complete responses")


def _draw_staleness(axes: Axes, outcome: Outcome) -> None:
    ages = sorted(outcome.staleness_counts)
    axes.bar(ages, [100 * outcome.staleness_counts[age] / outcome.tokens for age in ages], color=BUSY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel(axes, "staleness of the asynchronous run", "steps from a token to its training", "% of tokens")


def _draw_rates(
    axes: Axes, outcomes: Mapping[str, Outcome], sweep: Sequence[tuple[Run, SteadyState, Outcome]]
) -> None:
    devices = [run.num_training for run, _, _ in sweep]
    axes.plot(devices, [state.tokens_per_s for _, state, _ in sweep], color=INK, label="analytical model")
    axes.plot(devices, [outcome.tokens_per_s for _, _, outcome in sweep], "o", color=BUSY, label="simulated")
    axes.axhline(outcomes["synchronous"].tokens_per_s, color=OTHER, linestyle="--", label="synchronous")
    panel(axes, "throughput of each division", "devices that train", "tokens of responses a second")


def _draw_ages(axes: Axes, sweep: Sequence[tuple[Run, SteadyState, Outcome]], max_staleness: float) -> None:
    devices = [run.num_training for run, _, _ in sweep]
    model = [state.staleness for _, state, _ in sweep]
    most = [outcome.largest_staleness for _, _, outcome in sweep]
    mean = [outcome.mean_staleness for _, _, outcome in sweep]
    axes.plot(devices, model, color=INK, label="while generated, at most: model")
    axes.plot(devices, most, "o", color=BUSY, label="most, simulated")
    axes.plot(devices, mean, "x", color=INK, label="mean, simulated")
    if max_staleness != float("inf"):
        axes.axhline(max_staleness, color=OTHER, linestyle="--", label="bound")
    panel(axes, "staleness of each division", "devices that train", "optimizer steps")
