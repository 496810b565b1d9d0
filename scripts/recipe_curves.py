"""Expected curves of recipes: what is stored, how a new run is compared with them, and how they are drawn."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from scipy.stats import t as student

from hybridengine.charts import INK, drawing, panel
from hybridengine.errors import DataError, UnreadableError
from hybridengine.files import read_object
from hybridengine.report.keys import STEP
from hybridengine.report.step_rows import latest_rows, read_rows

REWARD, HELD_OUT = "reward/mean", "eval/score_mean"
NUM_PARTS = 4
"""Parts of a run whose means are compared: single steps are too noisy, and the last part alone hides a late start."""
FALSE_ALARMS = 0.01
"""Share of the recipes that are said to have changed when nothing has."""
COLOUR = "#0072B2"


@dataclass(frozen=True)
class SeedRun:
    """A run of a recipe with one seed."""

    seed: int
    rewards: tuple[float, ...]
    """Mean reward of each step."""
    held_out: tuple[float, float]
    """Mean score of held-out prompts before the first step and after the last one."""
    rows_per_step: int
    commit: str
    machine: str
    wall_s: float
    cpu_s: float
    """Processor time of all processes of the run."""


@dataclass(frozen=True)
class Part:
    """Mean reward of some steps of a new run beside that of the expected curve."""

    first: int
    last: int
    found: float
    expected: float
    tolerance: float

    @property
    def fits(self) -> bool:
        """True if the run is within the tolerance."""
        return abs(self.found - self.expected) <= self.tolerance


def read_run(folder: Path, num_steps: int) -> tuple[tuple[float, ...], tuple[float, float]]:
    """Return a run's rewards and held-out scores; raise DataError for steps without one."""
    rows = {row[STEP]: row for row in latest_rows(read_rows(folder))}
    rewards = [rows.get(step, {}).get(REWARD) for step in range(1, num_steps + 1)]
    held_out = [rows.get(step, {}).get(HELD_OUT) for step in (0, num_steps)]
    if missing := [step for step in range(num_steps + 1) if step not in rows]:
        raise DataError(
            f"{folder} has no row of step {missing[0]} of {num_steps}; the run ended early: see {folder}.log"
        )
    for key, values, start in ((REWARD, rewards, 1), (HELD_OUT, held_out, 0)):
        if None in values:
            step = start + values.index(None) if key == REWARD else (0, num_steps)[values.index(None)]
            raise DataError(f"{folder}: {key} of step {step} is not a number; see {folder}.log")
    return tuple(float(x) for x in rewards if x is not None), (
        float(held_out[0] or 0),
        float(held_out[1] or 0),
    )


def read_curve(file: Path) -> list[SeedRun]:
    """Return the runs of an expected curve; none if there is no file yet. Raises DataError for another file."""
    if not file.exists():
        return []
    try:
        return [
            SeedRun(**run | {name: tuple(run[name]) for name in ("rewards", "held_out")})
            for run in read_object(file)["runs"]
        ]
    except (UnreadableError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} is not an expected curve ({error!r}); restore it, or remove it and record it"
        ) from None


def write_curve(file: Path, runs: Sequence[SeedRun]) -> None:
    """Write runs in the order of their seeds, with mean, lowest and highest reward of each step beside them."""
    runs = sorted(runs, key=lambda run: run.seed)
    steps = [*zip(*(run.rewards for run in runs), strict=True)]
    content = {
        "mean": [round(fmean(step), 4) for step in steps],
        "lowest": [min(step) for step in steps],
        "highest": [max(step) for step in steps],
        "runs": [asdict(run) for run in runs],
    }
    lines = [f'  "{key}": {json.dumps(content[key])}' for key in ("mean", "lowest", "highest")]
    each = ",\n".join(f"    {json.dumps(run)}" for run in content["runs"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{\n" + ",\n".join([*lines, f'  "runs": [\n{each}\n  ]']) + "\n}\n")


def with_run(runs: Sequence[SeedRun], new: SeedRun) -> list[SeedRun]:
    """Return runs with a new one, which replaces an older one of its seed; raise DataError if they differ in length."""
    kept = [run for run in runs if run.seed != new.seed]
    if kept and len(kept[0].rewards) != len(new.rewards):
        raise DataError(
            f"the run has {len(new.rewards)} steps and the curve {len(kept[0].rewards)}; remove the curve's file to"
            " begin a new one"
        )
    return [*kept, new]


def check_spread(runs: Sequence[SeedRun]) -> None:
    """Raise DataError for a curve that has no spread."""
    if len(runs) < 2:
        raise DataError(
            f"the curve has {len(runs)} run(s), and a spread takes two; record more with --update"
        )


def compare(rewards: Sequence[float], runs: Sequence[SeedRun]) -> list[Part]:
    """Return the parts of a new run beside those of a curve of at least two runs.

    The tolerance is half of the prediction interval of one more run: Student's quantile times s·sqrt(1 + 1/k). s is the k
    runs' standard deviation around the mean of each part, pooled over the parts, and at least that of independent
    responses that are right or wrong. The level is divided by the number of parts (Bonferroni).
    """
    if len(runs) < 2:
        raise DataError(
            f"the curve has {len(runs)} run(s), and a spread takes two; record more with --update"
        )
    if len(rewards) != len(runs[0].rewards):
        raise DataError(
            f"the run has {len(rewards)} steps and the curve {len(runs[0].rewards)}; record it again"
        )
    bounds = [len(rewards) * part // NUM_PARTS for part in range(NUM_PARTS + 1)]
    spans = [*itertools.pairwise(bounds)]
    means = [[fmean(run.rewards[first:last]) for run in runs] for first, last in spans]
    freedom = NUM_PARTS * (len(runs) - 1)
    pooled = sum((one - fmean(part)) ** 2 for part in means for one in part) / freedom
    quantile = float(student.ppf(1 - FALSE_ALARMS / NUM_PARTS / 2, freedom))
    parts = []
    for (first, last), part in zip(spans, means, strict=True):
        expected = fmean(part)
        chance = max(0.0, expected * (1 - expected)) / ((last - first) * runs[0].rows_per_step)
        deviation = math.sqrt(max(pooled, chance) * (1 + 1 / len(runs)))
        parts.append(Part(first + 1, last, fmean(rewards[first:last]), expected, quantile * deviation))
    return parts


def page_table(curves: Mapping[str, Sequence[SeedRun]]) -> str:
    """Return the page's table: rewards of the first and last quarter with their ranges, the quarters' widest tolerance,
    held-out scores and least time."""
    lines = [
        "| recipe | seeds | reward, first quarter | reward, last quarter | tolerance | held-out | time | of processors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in sorted(curves.items()):
        size = len(runs[0].rewards) // NUM_PARTS
        parts = [[fmean(run.rewards[part]) for run in runs] for part in (slice(size), slice(-size, None))]
        first, last = (f"{fmean(part):.2f} ({min(part):.2f} to {max(part):.2f})" for part in parts)
        before, after = (fmean(run.held_out[end] for run in runs) for end in (0, 1))
        wall, cpu = (
            min(seconds) / 60 for seconds in zip(*((run.wall_s, run.cpu_s) for run in runs), strict=True)
        )
        scores = f"{before:.2f} -> {after:.2f}"
        within = (
            f"{max(part.tolerance for part in compare(runs[0].rewards, runs)):.2f}" if len(runs) > 1 else "-"
        )
        lines.append(
            f"| `{name}` | {len(runs)} | {first} | {last} | {within} | {scores} | {wall:.0f} min | {cpu:.0f} min |"
        )
    return "\n".join(lines)


def draw(curves: Mapping[str, Sequence[SeedRun]], file: Path) -> None:
    """Draw a panel for each recipe: the mean reward over its seeds, their range, and the means of a quarter."""
    width = 2 if len(curves) > 1 else 1
    height = math.ceil(len(curves) / width)
    with drawing(file, "Reward of the recipes", 4.2 * width, 2.6 * height) as figure:
        grid = figure.subplots(height, width, squeeze=False).flat
        for (name, runs), axes in zip(curves.items(), grid, strict=False):
            steps = range(1, len(runs[0].rewards) + 1)
            columns = [*zip(*(run.rewards for run in runs), strict=True)]
            if len(runs) > 1:
                lowest, highest = [min(column) for column in columns], [max(column) for column in columns]
                label = f"range of {len(runs)} seeds"
                axes.fill_between(steps, lowest, highest, color=COLOUR, alpha=0.2, linewidth=0, label=label)
            label = "mean" if len(runs) > 1 else "one seed"
            axes.plot(steps, [fmean(column) for column in columns], color=COLOUR, label=label)
            for part in compare(runs[0].rewards, runs) if len(runs) > 1 else ():
                ends = [part.first - 0.5, part.last + 0.5]
                axes.plot(ends, [part.expected] * 2, color=INK, linewidth=0.8)
                axes.fill_between(
                    ends,
                    max(0.0, part.expected - part.tolerance),
                    min(1.0, part.expected + part.tolerance),  # rewards are shares
                    color=INK,
                    alpha=0.08,
                )
            panel(axes, name, "step", "mean reward")
        for axes in grid:  # those that are left
            axes.set_visible(False)
