"""Console output of a run in plain ASCII: one line per step, and a table at the end; colours only on a terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from hybridengine.formatting import format_bytes, format_seconds
from hybridengine.report import keys
from hybridengine.report.step_rows import Row, latest_rows

PHASE_LABELS = {
    "switch_to_generate": "to-gen",
    "switch_to_train": "to-train",
    "update_actor": "actor",
    "update_critic": "critic",
}
"""Short names of phases in the line of a step; other phases keep their names."""

SHOWN = (
    ("reward", keys.REWARD_MEAN, "{:.3f}"),
    ("kl", keys.KL_MEAN, "{:.4f}"),
    ("loss", keys.SFT_LOSS, "{:.3f}"),
    ("loss", keys.DPO_LOSS, "{:.3f}"),
    ("accuracy", keys.DPO_ACCURACY, "{:.1%}"),
)
"""Label, metric and format of the results in the line of a step."""

_MISSING = "-"


RESULTS = {
    keys.EXACT_MATCH: "exact match",
    keys.SCORE_MEAN: "held-out score",
    keys.HELD_OUT_LOSS: "held-out loss",
}
"""Name of each result of an evaluation; of those in a row, the first is shown."""


@dataclass(frozen=True)
class HeldOutResult:
    """Result of an evaluation: exact match (in percent) if only a function gives the reward, otherwise the mean score, or
    the loss of responses of the data.
    """

    value: float
    """Value of the result; NaN if it was not finite."""
    name: str
    """Name of the result, one of `RESULTS`."""

    @property
    def is_share(self) -> bool:
        """True if the value is the share of problems with full score, 0 to 1."""
        return self.name == RESULTS[keys.EXACT_MATCH]

    def __str__(self) -> str:
        return f"{100 * self.value:.1f}%" if self.is_share else f"{self.value:.3f}"


def held_out_results(rows: Iterable[Row]) -> list[HeldOutResult]:
    """Return the results of the rows that have one."""
    found = ((row, next((key for key in RESULTS if key in row), None)) for row in rows)
    return [HeldOutResult(_number(row[key]), RESULTS[key]) for row, key in found if key is not None]


def step_line(row: Row, num_steps: int) -> str:
    """Return the row as one line, without the metrics it lacks; a value that was not finite is "nan"."""
    width = len(str(num_steps))
    results = [f"step {row[keys.STEP]:>{width}}/{num_steps}"]
    for label, key, form in SHOWN:
        if key in row:
            results.append(f"{label} {form.format(_number(row[key]))}")
    results += [f"eval {result}" for result in held_out_results([row])]
    if dropped := row.get(keys.HELD_OUT_DROPPED):
        results[-1] += f" ({dropped:.1%} without a score)"
    results += asynchronous_results(row)
    times = []
    for key, value in row.items():
        phase = keys.phase_of(key)
        if phase is not None and key != keys.STEP_S:
            times.append(f"{PHASE_LABELS.get(phase, phase.replace('_', '-'))} {_compact_s(value)}")
    if keys.STEP_S in row:
        times.append(f"step {_compact_s(row[keys.STEP_S])}")
    if keys.TOKENS_PER_S in row:
        times.append(f"{_number(row[keys.TOKENS_PER_S]):.0f} tok/s")
    return "  ".join(results) + ("  | " + "  ".join(times) if times else "")


def asynchronous_results(row: Row) -> list[str]:
    """Return the queue, the ages of trained tokens and the idle shares of an asynchronous step; [] for another row.

    The idle share of several engines is their mean, under the name of their pool.
    """
    if keys.QUEUE_COMPLETE not in row:
        return []
    complete, unfinished, mean, most, masked = (
        _number(row.get(key))
        for key in (keys.QUEUE_COMPLETE, keys.QUEUE_UNFINISHED, keys.AGE_MEAN, keys.AGE_MAX, keys.OLDER_SHARE)
    )
    idle = dict[str, list[float]]()
    for key, share in row.items():
        if pool := keys.pool_of(key):
            idle.setdefault(pool.partition(".")[0], []).append(_number(share))
    shares = (f"{pool} {statistics.fmean(shares):.0%}" for pool, shares in sorted(idle.items()))
    return [
        f"queue {complete:.0f} complete, {unfinished:.0f} unfinished",
        f"age {mean:.2f}, at most {most:.0f}, {masked:.1%} masked",
        f"idle {', '.join(shares)}",
    ]


def summary_table(rows: Sequence[Row]) -> Table:
    """Return a table of held-out results, phases and switches; "-" without a value, "nan" if one was not finite."""
    rows = latest_rows(rows)
    num_steps = sum(bool(row[keys.STEP]) for row in rows)
    table = Table(title=f"Run of {num_steps} steps", box=box.SIMPLE_HEAVY, title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("mean per step", justify="right", no_wrap=True)
    if evaluations := held_out_results(rows):
        before, after = evaluations[0], evaluations[-1] if len(evaluations) > 1 else None
        table.add_row(f"{before.name} before", str(before), "")
        table.add_row(f"{before.name} after", str(after or _MISSING), "")
        if after and before.is_share and after.is_share:
            table.add_row("gain", f"{100 * (after.value - before.value):+.1f} points", "")
        table.add_section()
    values: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            values.setdefault(key, []).append(_number(value))
    for key, seconds in values.items():
        if phase := keys.phase_of(key):
            total = sum(seconds)
            label = f"time: {phase.replace('_', ' ')}"
            table.add_row(label, format_seconds(total), format_seconds(total / len(seconds)))
    if keys.HELD_OUT_LOSS in values:
        return table  # of a run that draws no responses
    table.add_section()
    received = values.get(keys.RECEIVED_BYTES, [])
    total = sum(received) if received else None
    table.add_row("received bytes", _bytes(total), _bytes(None if total is None else total / len(received)))
    for label, key in (
        ("peak weight bytes", keys.PEAK_WEIGHT_BYTES),
        ("redundant bytes", keys.REDUNDANT_BYTES),
    ):
        table.add_row(f"{label}, max", _bytes(_largest(values.get(key))), "")
    difference = _largest(values.get(keys.LOG_PROB_ABS_DIFF_MAX))
    table.add_row("log-prob difference, max", _MISSING if difference is None else f"{difference:.2e}", "")
    return table


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _largest(values: Sequence[float] | None) -> float | None:
    """Return the largest value, NaN if there is one; None without values."""
    return max(values, key=lambda value: (math.isnan(value), value)) if values else None


def _bytes(num_bytes: float | None) -> str:
    return _MISSING if num_bytes is None else format_bytes(num_bytes)


def _compact_s(seconds: float | None) -> str:
    return format_seconds(_number(seconds)).replace(" ", "")
