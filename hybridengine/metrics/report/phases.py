"""Section: where the time of a step goes."""

from __future__ import annotations

import numpy as np

from hybridengine.metrics import keys
from hybridengine.metrics.report.blocks import ChartGroup, Section, Table, format_value
from hybridengine.metrics.report.charts import curve, stacked_bars
from hybridengine.metrics.report.colours import OTHER, phase_colours
from hybridengine.metrics.report.curves import column, metric_keys
from hybridengine.metrics.report.run_record import RunRecord

MAX_PHASES = 9
"""Phases that are told apart; the others are drawn as one."""
OTHERS = "other phases"


def phases_section(run: RunRecord) -> Section:
    """Seconds of every phase per step, stacked, and over the run."""
    rows = [row for row in run.rows if (row[keys.STEP] or 0) >= 1]
    steps = [int(row[keys.STEP] or 0) for row in rows]
    seconds = {
        phase: np.asarray([row.get(key) or 0.0 for row in rows])
        for key in metric_keys(rows)
        if (phase := keys.phase_of(key)) is not None and key != keys.STEP_S
    }
    seconds = {phase: values for phase, values in seconds.items() if values.any()}
    if not seconds:
        return Section("time", "Time", [], notes=["The run has measured no phases."])
    longest = sorted(seconds, key=lambda phase: -seconds[phase].sum())[:MAX_PHASES]
    parts = {phase: values for phase, values in seconds.items() if phase in longest}
    rest = [values for phase, values in seconds.items() if phase not in longest]
    colours = phase_colours(parts) | {OTHERS: OTHER}
    if rest:
        parts[OTHERS] = np.sum(rest, axis=0)
    stack = stacked_bars(
        "Seconds of every phase, step by step",
        "s",
        steps,
        {name: v.tolist() for name, v in parts.items()},
        colours,
    )
    singles = []
    for key in (keys.STEP_S, keys.OVERHEAD_S):
        places, values = column(rows, key)
        if any(value is not None for value in values):
            singles.append(curve(key, "s", places, values))
    blocks = [
        ChartGroup([stack], wide=True),
        ChartGroup(singles),
        _table(seconds, column(rows, keys.STEP_S)[1]),
    ]
    lead = (
        "Wall-clock seconds of the slowest rank in each phase. Roles with pools of their own work at the same time: then"
        " the phases add up to more than the step."
    )
    return Section("time", "Time", blocks, lead)


def _table(seconds: dict[str, np.ndarray], steps_s: list[float | None]) -> Table:
    whole = sum(value or 0.0 for value in steps_s)
    rows = [
        (
            phase,
            format_value(float(values.sum()), "s"),
            format_value(float(values.mean()), "s"),
            f"{values.sum() / whole:.1%}" if whole else "-",
        )
        for phase, values in sorted(seconds.items(), key=lambda entry: -entry[1].sum())
    ]
    columns = ("phase", "total", "mean per step", "share of the steps")
    return Table("Phases, the longest first", columns, rows)
