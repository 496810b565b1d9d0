"""A run on the console: one line per step, and a table at the end.

Rows are lines of plain ASCII. Where the output is not a terminal there are no colours, control characters or
wraps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridengine.metrics import keys
from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.metrics.held_out import HeldOutResult
from hybridengine.metrics.rows import Row
from hybridengine.metrics.samples import Sample, terminal_table
from hybridengine.metrics.summary import RunSummary, summarise

PHASE_LABELS = {
    "switch_to_generate": "to-gen",
    "switch_to_train": "to-train",
    "update_actor": "actor",
    "update_critic": "critic",
}
"""Short names of phases on a step's line; other phases go by their own."""

_MISSING = "-"


class RunConsole:
    """Prints the progress of one run."""

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        """`num_steps` is the number of training steps; `console` defaults to standard output."""
        self._num_steps = num_steps
        self._console = console or Console()

    def print_step(self, row: Row) -> None:
        """Print the row of a step as one line."""
        self._console.print(Text(step_line(row, self._num_steps)), soft_wrap=True)

    def print_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Print responses of an evaluation, a line each."""
        self._console.print(terminal_table(step, samples))

    def print_summary(self, rows: Sequence[Row]) -> None:
        """Print the table of a whole run's rows."""
        self._console.print(summary_table(summarise(rows)))


def step_line(row: Row, num_steps: int) -> str:
    """The row as one line: step, reward, KL, evaluation, then seconds per phase and tokens per second.

    What the row lacks is left out; what was not finite reads "nan".
    """
    width = len(str(num_steps))
    results = [f"step {row[keys.STEP]:>{width}}/{num_steps}"]
    for label, key, form in (("reward", keys.REWARD_MEAN, "{:.3f}"), ("kl", keys.KL_MEAN, "{:.4f}")):
        if key in row:
            results.append(f"{label} {form.format(_number(row[key]))}")
    if held_out := HeldOutResult.of(row):
        results.append(f"eval {held_out}")
    times = []
    for key, value in row.items():
        phase = keys.phase_of(key)
        if phase is not None and key != keys.STEP_S:
            times.append(f"{PHASE_LABELS.get(phase, phase.replace('_', '-'))} {_compact_s(_number(value))}")
    if keys.STEP_S in row:
        times.append(f"step {_compact_s(_number(row[keys.STEP_S]))}")
    if keys.TOKENS_PER_S in row:
        times.append(f"{_number(row[keys.TOKENS_PER_S]):.0f} tok/s")
    return "  ".join(results) + ("  | " + "  ".join(times) if times else "")


def summary_table(summary: RunSummary) -> Table:
    """Accuracy before and after, seconds per phase, and what the switches cost."""
    table = Table(title=f"Run of {summary.num_steps} steps", box=box.SIMPLE_HEAVY, title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("mean per step", justify="right", no_wrap=True)
    before, after = summary.held_out_before, summary.held_out_after
    if before:
        table.add_row(f"{before.name} before", str(before), "")
        table.add_row(f"{before.name} after", str(after or _MISSING), "")
        if after and before.is_share and after.is_share:
            table.add_row("gain", f"{100 * (after.value - before.value):+.1f} points", "")
        table.add_section()
    for phase, time in summary.phases.items():
        label = f"time: {phase.replace('_', ' ')}"
        table.add_row(label, format_seconds(time.sum_s), format_seconds(time.mean_s))
    table.add_section()
    table.add_row("received bytes", _bytes(summary.received_bytes), _bytes(summary.received_bytes_per_step))
    table.add_row("peak weight bytes, max", _bytes(summary.peak_weight_bytes), "")
    table.add_row("redundant bytes, max", _bytes(summary.redundant_bytes), "")
    difference = summary.log_prob_abs_diff_max
    table.add_row("log-prob difference, max", _MISSING if difference is None else f"{difference:.2e}", "")
    return table


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _bytes(num_bytes: float | None) -> str:
    return _MISSING if num_bytes is None else format_bytes(num_bytes)


def _compact_s(seconds: float) -> str:
    return format_seconds(seconds).replace(" ", "")
