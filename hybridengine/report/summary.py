"""Totals of a run, computed from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridengine.report import keys
from hybridengine.report.step_rows import Row, latest_rows, number


@dataclass(frozen=True)
class HeldOutResult:
    """Result of an evaluation: exact match if a function alone gives the reward, otherwise the mean score.

    Its text is a percentage or a plain number, respectively.
    """

    value: float
    """Value of the result; NaN if it was not finite."""
    is_share: bool
    """True if the value is the share of problems with full score, 0 to 1."""

    @classmethod
    def of(cls, row: Row) -> HeldOutResult | None:
        """Return the result in a row; None if the step was not evaluated."""
        for key, is_share in ((keys.EXACT_MATCH, True), (keys.SCORE_MEAN, False)):
            if key in row:
                return cls(number(row[key]), is_share)
        return None

    @property
    def name(self) -> str:
        """Name of the result."""
        return "exact match" if self.is_share else "held-out score"

    def __str__(self) -> str:
        return f"{100 * self.value:.1f}%" if self.is_share else f"{self.value:.3f}"


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase over the run."""

    sum_s: float
    mean_s: float
    """Mean seconds over the steps that have the phase."""


@dataclass(frozen=True)
class RunSummary:
    """Totals of a run: None if no row has the metric, NaN if a row has it as null (not finite)."""

    num_steps: int
    """Number of training steps: rows with a step of 1 or more."""
    held_out_before: HeldOutResult | None
    """First evaluation of the run; that of the warmed-up model if step 0 was evaluated."""
    held_out_after: HeldOutResult | None
    """Last evaluation; None if there was only one."""
    phases: Mapping[str, PhaseTime]
    """Seconds of each phase, in order of first appearance."""
    received_bytes: float | None
    """Received bytes of all switches."""
    received_bytes_per_step: float | None
    peak_weight_bytes: float | None
    """Largest peak of the run."""
    redundant_bytes: float | None
    """Largest redundant bytes of the run."""
    log_prob_abs_diff_max: float | None
    """Largest log-prob difference of the run."""


def summarise(rows: Sequence[Row]) -> RunSummary:
    """Return the totals of `rows` as recorded; `latest_rows` resolves repeated steps."""
    ordered = latest_rows(list(rows))
    values: dict[str, list[float]] = {}
    for row in ordered:
        for key, value in row.items():
            values.setdefault(key, []).append(number(value))
    evaluations = [found for row in ordered if (found := HeldOutResult.of(row))]
    times = {phase: values[key] for key in values if (phase := keys.phase_of(key)) is not None}
    received = values.get(keys.RECEIVED_BYTES)

    def largest(key: str) -> float | None:
        return float(np.max(values[key])) if key in values else None  # NaN if any value is

    return RunSummary(
        num_steps=sum(step >= 1 for step in values.get(keys.STEP, ())),
        held_out_before=evaluations[0] if evaluations else None,
        held_out_after=evaluations[-1] if len(evaluations) > 1 else None,
        phases={phase: PhaseTime(sum(some), sum(some) / len(some)) for phase, some in times.items()},
        received_bytes=sum(received) if received else None,
        received_bytes_per_step=sum(received) / len(received) if received else None,
        peak_weight_bytes=largest(keys.PEAK_WEIGHT_BYTES),
        redundant_bytes=largest(keys.REDUNDANT_BYTES),
        log_prob_abs_diff_max=largest(keys.LOG_PROB_ABS_DIFF_MAX),
    )
