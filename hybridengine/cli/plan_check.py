"""`hybridengine plan --check`: predictions of runs that have been carried out, beside what they took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybridengine.cli.figure_tables import aligned
from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.metrics.measured_run import MeasuredRun
from hybridengine.planning.clusters import Cluster
from hybridengine.planning.given import given_plan

PHASE_TOLERANCE, STEP_TOLERANCE = 0.25, 0.15
"""Largest deviations of predictions, as shares of what was measured."""
JUDGED_SHARE = 0.02
"""Share of the step below which phases are shown, and not judged; on a shared machine they vary too much."""


def check_run(run: MeasuredRun, cluster: Cluster) -> dict[str, Any]:
    """Return figures of a run beside its prediction, with the lengths that it had. Units: seconds and bytes.

    Raises:
        TopologyError: sizes that the planner has no costs for.
    """
    plan = given_plan(run.config, run.workload, cluster)
    engine = plan.option("actor").engine
    assert engine is not None, "an actor generates"
    phases = [
        _phase(
            phase,
            measured_s,
            plan.phases_s[phase],
            PHASE_TOLERANCE if measured_s >= JUDGED_SHARE * run.step_s else None,
        )
        for phase, measured_s in run.phases_s.items()
    ]
    phases.append(_phase("step", run.step_s, plan.step_s, STEP_TOLERANCE))
    return {
        "run": str(run.folder),
        "num_steps": run.num_steps,
        "phases": phases,
        "peak_weight_bytes": {"measured": run.peak_weight_bytes, "predicted": engine.switch.peak_bytes},
        "memory_bytes": {
            "measured": run.memory_bytes.get("resident_bytes"),
            "predicted": max(pool.peak_bytes for pool in plan.pools),
        },
        "within": all(phase["within"] is not False for phase in phases),
    }


def _phase(name: str, measured_s: float, predicted_s: float, tolerance: float | None) -> dict[str, Any]:
    """Return a phase beside its prediction; without a tolerance it is not judged."""
    deviation = predicted_s / measured_s - 1
    return {
        "phase": name,
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "deviation": deviation,
        "tolerance": tolerance,
        "within": None if tolerance is None else abs(deviation) <= tolerance,
    }


def check_lines(
    runs: Sequence[MeasuredRun], checks: Sequence[dict[str, Any]], cluster: Cluster
) -> Iterator[str]:
    """Yield every run as a table, with what is beyond its tolerance."""
    yield f"cluster: {cluster.name}"
    for run, check in zip(runs, checks, strict=True):
        config = run.config
        yield ""
        yield (
            f"{run.folder}: {config.rows_per_step} rows a step, actor {config.actor.parallel} and"
            f" {config.actor.generate}, responses of {run.workload.lengths.mean:.0f} tokens (mean); medians of"
            f" {run.num_steps} steps"
        )
        rows = [["phase", "measured", "predicted", "", ""]]
        for phase in check["phases"]:
            mark = "" if phase["within"] else f"BEYOND {phase['tolerance'] or 0:.0%}"
            if phase["within"] is None:
                mark = "not judged: less than 2 % of the step"
            rows.append(
                [
                    f"  {phase['phase']}",
                    format_seconds(phase["measured_s"]),
                    format_seconds(phase["predicted_s"]),
                    f"{phase['deviation']:+.0%}",
                    mark,
                ]
            )
        yield from aligned(rows)
        weights, memory = check["peak_weight_bytes"], check["memory_bytes"]
        yield (
            f"  weights while switching: measured {format_bytes(weights['measured'])}, predicted"
            f" {format_bytes(weights['predicted'])}"
        )
        if resident := memory["measured"]:
            yield (
                f"  memory of the fullest process: measured {format_bytes(resident)}, predicted"
                f" {format_bytes(memory['predicted'])} ({memory['predicted'] / resident - 1:+.0%})"
            )
    judged = [phase["within"] for check in checks for phase in check["phases"] if phase["within"] is not None]
    yield ""
    yield (
        f"{sum(judged)} of {len(judged)} within {PHASE_TOLERANCE:.0%} (phases) and {STEP_TOLERANCE:.0%} (steps)"
        + ("" if all(judged) else "; calibrate anew on a quiet machine, or look at what is beyond")
    )
