"""Console output of a run: one line per step, and a table at the end.

Lines are plain ASCII. If the output is not a terminal, it has no colours, control characters or wrapping.
"""

from __future__ import annotations

from rich import box
from rich.table import Table

from hybridengine.formatting import format_bytes, format_seconds
from hybridengine.report import keys
from hybridengine.report.step_rows import Row, number
from hybridengine.report.summary import HeldOutResult, RunSummary

PHASE_LABELS = {
    "switch_to_generate": "to-gen",
    "switch_to_train": "to-train",
    "update_actor": "actor",
    "update_critic": "critic",
}
"""Short names of phases in the line of a step; other phases keep their names."""

_MISSING = "-"


def step_line(row: Row, num_steps: int) -> str:
    """Return the row as one line: step, reward, KL, evaluation, then seconds per phase and tokens per second.

    Missing metrics are omitted; a value that was not finite is printed as "nan".
    """
    width = len(str(num_steps))
    results = [f"step {row[keys.STEP]:>{width}}/{num_steps}"]
    for label, key, form in (("reward", keys.REWARD_MEAN, "{:.3f}"), ("kl", keys.KL_MEAN, "{:.4f}")):
        if key in row:
            results.append(f"{label} {form.format(number(row[key]))}")
    if held_out := HeldOutResult.of(row):
        results.append(f"eval {held_out}")
    times = []
    for key, value in row.items():
        phase = keys.phase_of(key)
        if phase is not None and key != keys.STEP_S:
            times.append(f"{PHASE_LABELS.get(phase, phase.replace('_', '-'))} {_compact_s(number(value))}")
    if keys.STEP_S in row:
        times.append(f"step {_compact_s(number(row[keys.STEP_S]))}")
    if keys.TOKENS_PER_S in row:
        times.append(f"{number(row[keys.TOKENS_PER_S]):.0f} tok/s")
    return "  ".join(results) + ("  | " + "  ".join(times) if times else "")


def summary_table(summary: RunSummary) -> Table:
    """Return a table of the held-out result before and after, the seconds per phase and the cost of the switches."""
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


def _bytes(num_bytes: float | None) -> str:
    return _MISSING if num_bytes is None else format_bytes(num_bytes)


def _compact_s(seconds: float) -> str:
    return format_seconds(seconds).replace(" ", "")
