"""`hybridengine plan --check`: what the model says of a run that has been carried out, beside what it took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybridengine.cli.figure_tables import aligned
from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.metrics.measured_run import MeasuredRun
from hybridengine.planning.clusters import Cluster
from hybridengine.planning.given import given_plan
from hybridengine.planning.plan import Plan

PHASE_TOLERANCE, STEP_TOLERANCE = 0.25, 0.15
"""How far predictions may be off, as shares of what was measured."""
JUDGED_SHARE = 0.02
"""Of the step: shorter phases are shown, and not judged; on a shared machine they vary too much from step to step."""


@dataclass(frozen=True)
class CheckedPhase:
    """A phase, or the step."""

    name: str
    measured_s: float
    predicted_s: float
    tolerance: float | None
    """None where it is not judged."""

    @property
    def deviation(self) -> float:
        """Predicted beyond measured, as a share of it."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_beyond(self) -> bool:
        return self.tolerance is not None and abs(self.deviation) > self.tolerance


@dataclass(frozen=True)
class Check:
    """A run beside its prediction."""

    run: MeasuredRun
    plan: Plan
    phases: tuple[CheckedPhase, ...]
    """The step last."""

    @property
    def beyond(self) -> list[CheckedPhase]:
        return [phase for phase in self.phases if phase.is_beyond]

    @property
    def predicted_weight_bytes(self) -> int:
        """Most weights that a rank holds while switching."""
        engine = self.plan.option("actor").engine
        assert engine is not None, "an actor generates"
        return engine.least.peak_bytes

    @property
    def predicted_bytes(self) -> int:
        """Most that a rank holds."""
        return max(pool.peak_bytes for pool in self.plan.pools)


def check_run(run: MeasuredRun, cluster: Cluster) -> Check:
    """The prediction of a run, with the lengths that it had.

    Raises:
        TopologyError: sizes that the planner has no costs for.
    """
    plan = given_plan(run.config, run.workload, cluster)
    phases = [
        CheckedPhase(
            phase,
            measured_s,
            plan.phases_s[phase],
            PHASE_TOLERANCE if measured_s >= JUDGED_SHARE * run.step_s else None,
        )
        for phase, measured_s in run.phases_s.items()
    ]
    return Check(run, plan, (*phases, CheckedPhase("step", run.step_s, plan.step_s, STEP_TOLERANCE)))


def check_lines(checks: Sequence[Check], cluster: Cluster) -> Iterator[str]:
    """Every run as a table, and what is beyond its tolerance."""
    yield f"cluster: {cluster.name}"
    for check in checks:
        run, config = check.run, check.run.config
        yield ""
        yield (
            f"{run.folder}: {config.rows_per_step} rows a step, actor {config.actor.parallel} and"
            f" {config.actor.generate}, responses of {run.workload.lengths.mean:.0f} tokens (mean); medians of"
            f" {run.num_steps} steps"
        )
        rows = [["phase", "measured", "predicted", "", ""]]
        for phase in check.phases:
            if phase.tolerance is None:
                mark = "not judged: less than 2 % of the step"
            else:
                mark = f"BEYOND {phase.tolerance:.0%}" if phase.is_beyond else ""
            rows.append(
                [
                    f"  {phase.name}",
                    format_seconds(phase.measured_s),
                    format_seconds(phase.predicted_s),
                    f"{phase.deviation:+.0%}",
                    mark,
                ]
            )
        yield from aligned(rows)
        yield (
            f"  weights while switching: measured {format_bytes(run.peak_weight_bytes)}, predicted"
            f" {format_bytes(check.predicted_weight_bytes)}"
        )
        if resident := run.memory_bytes.get("resident_bytes"):
            yield (
                f"  memory of the fullest process: measured {format_bytes(resident)}, predicted"
                f" {format_bytes(check.predicted_bytes)} ({check.predicted_bytes / resident - 1:+.0%})"
            )
    beyond = sum(len(check.beyond) for check in checks)
    judged = sum(phase.tolerance is not None for check in checks for phase in check.phases)
    yield ""
    yield (
        f"{judged - beyond} of {judged} within {PHASE_TOLERANCE:.0%} (phases) and {STEP_TOLERANCE:.0%} (steps)"
        + ("" if not beyond else "; calibrate anew on a quiet machine, or look at what is beyond")
    )


def check_json(check: Check) -> dict[str, Any]:
    """A check for programs. Units: seconds and bytes."""
    return {
        "run": str(check.run.folder),
        "num_steps": check.run.num_steps,
        "phases": [
            {
                "phase": phase.name,
                "measured_s": phase.measured_s,
                "predicted_s": phase.predicted_s,
                "deviation": phase.deviation,
                "tolerance": phase.tolerance,
                "within": None if phase.tolerance is None else not phase.is_beyond,
            }
            for phase in check.phases
        ],
        "peak_weight_bytes": {
            "measured": check.run.peak_weight_bytes,
            "predicted": check.predicted_weight_bytes,
        },
        "memory_bytes": {
            "measured": check.run.memory_bytes.get("resident_bytes"),
            "predicted": check.predicted_bytes,
        },
        "within": not check.beyond,
    }
