"""What the rows of a whole run amount to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybridengine.metrics import keys
from hybridengine.metrics.held_out import HeldOutResult
from hybridengine.metrics.rows import Row, latest_rows


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase over the run."""

    sum_s: float
    mean_s: float
    """Mean over the steps that had the phase."""


@dataclass(frozen=True)
class RunSummary:
    """Totals of a run. None where no row had the metric; NaN where a row had it as null (not finite)."""

    num_steps: int
    """Training steps: rows with a step of 1 or more."""
    held_out_before: HeldOutResult | None
    """First evaluation of the run; the warmed-up model's, if step 0 was evaluated."""
    held_out_after: HeldOutResult | None
    """Last evaluation; None where there was only one."""
    phases: Mapping[str, PhaseTime]
    """Phase -> its seconds, in order of first appearance."""
    received_bytes: float | None
    """Sum over all switches."""
    received_bytes_per_step: float | None
    peak_weight_bytes: float | None
    """Largest of the run."""
    redundant_bytes: float | None
    """Largest of the run."""
    log_prob_abs_diff_max: float | None
    """Largest of the run."""


def summarise(rows: Sequence[Row]) -> RunSummary:
    """Totals of `rows` (as recorded; see `latest_rows` for steps that come again)."""
    ordered = latest_rows(list(rows))
    evaluations = [found for row in ordered if (found := HeldOutResult.of(row))]
    phases = {}
    for key in dict.fromkeys(key for row in ordered for key in row):
        phase = keys.phase_of(key)
        if phase is not None:
            seconds = _values(ordered, key)
            phases[phase] = PhaseTime(sum(seconds), sum(seconds) / len(seconds))
    received = _values(ordered, keys.RECEIVED_BYTES)
    return RunSummary(
        num_steps=sum(1 for row in ordered if (row[keys.STEP] or 0) >= 1),
        held_out_before=evaluations[0] if evaluations else None,
        held_out_after=evaluations[-1] if len(evaluations) > 1 else None,
        phases=phases,
        received_bytes=sum(received) if received else None,
        received_bytes_per_step=sum(received) / len(received) if received else None,
        peak_weight_bytes=_largest(_values(ordered, keys.PEAK_WEIGHT_BYTES)),
        redundant_bytes=_largest(_values(ordered, keys.REDUNDANT_BYTES)),
        log_prob_abs_diff_max=_largest(_values(ordered, keys.LOG_PROB_ABS_DIFF_MAX)),
    )


def _values(rows: Iterable[Row], key: str) -> list[float]:
    present = (row[key] for row in rows if key in row)
    return [math.nan if value is None else value for value in present]


def _largest(values: list[float]) -> float | None:
    """The maximum, NaN where any value is NaN (Python's max would depend on the order), None of nothing."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values, default=None)
