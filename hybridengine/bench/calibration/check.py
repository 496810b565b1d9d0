"""`hybridengine plan --check`: comparison of finished runs with their predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybridengine.bench.calibration.fitting import LIGHT_SHARE, MeasuredRun
from hybridengine.formatting import format_bytes, table
from hybridengine.planning.costs.clusters import Cluster

PHASE_TOLERANCE, STEP_TOLERANCE = 0.25, 0.15
"""Largest allowed deviations of predictions, as shares of the measurements."""
COLUMNS = {
    "phase": "phase",
    "measured_s": "measured",
    "predicted_s": "predicted",
    "deviation_share": "deviation",
    "verdict": "",
}


def check_run(run: MeasuredRun, cluster: Cluster) -> dict[str, Any]:
    """Return the measured and predicted figures of a run. Units: seconds and bytes."""
    plan = run.predicted(cluster)
    engine = plan.option("actor").engine
    assert engine is not None, "an actor generates"
    phases = []
    for phase, measured_s in {**run.phases_s, "step": run.step_s}.items():
        predicted_s = {**plan.phases_s, "step": plan.step_s}[phase]
        deviation = predicted_s / measured_s - 1
        tolerance = STEP_TOLERANCE if phase == "step" else PHASE_TOLERANCE
        if measured_s < LIGHT_SHARE * run.step_s:
            tolerance = None
        phases.append(
            {
                "phase": phase,
                "measured_s": measured_s,
                "predicted_s": predicted_s,
                "deviation_share": deviation,
                "tolerance": tolerance,
                "within": None if tolerance is None else abs(deviation) <= tolerance,
            }
        )
    return {
        "run": run.name,
        "num_steps": run.num_steps,
        "phases": phases,
        "peak_weight_bytes": {"measured": run.peak_weight_bytes, "predicted": engine.switch.peak_bytes},
        "memory_bytes": {
            "measured": run.resident_bytes,
            "predicted": max(pool.peak_bytes for pool in plan.pools),
        },
        "within": all(phase["within"] is not False for phase in phases),
    }


def check_lines(
    runs: Sequence[MeasuredRun], checks: Sequence[dict[str, Any]], cluster: Cluster
) -> Iterator[str]:
    """Yield the lines of a table per run, with a mark on deviations beyond the tolerance."""
    yield f"cluster: {cluster.name}"
    for run, check in zip(runs, checks, strict=True):
        config = run.config
        yield ""
        yield (
            f"{run.name}: {config.rows_per_step} rows a step, actor {config.actor.parallel} and {config.actor.generate},"
            f" responses of {run.workload.lengths.mean:.0f} tokens (mean); medians of {run.num_steps} steps"
        )
        yield from table([{**phase, "verdict": _verdict(phase)} for phase in check["phases"]], COLUMNS)
        for name, key in (
            ("weights while switching", "peak_weight_bytes"),
            ("fullest process", "memory_bytes"),
        ):
            measured, predicted = check[key].values()
            yield f"  {name}: measured {format_bytes(measured)}, predicted {format_bytes(predicted)}"
    judged = [phase["within"] for check in checks for phase in check["phases"] if phase["within"] is not None]
    yield ""
    yield (
        f"{sum(judged)} of {len(judged)} within {PHASE_TOLERANCE:.0%} (phases) and {STEP_TOLERANCE:.0%} (steps)"
        + ("" if all(judged) else "; calibrate anew on a quiet machine, or look at what is beyond")
    )


def _verdict(phase: dict[str, Any]) -> str:
    if phase["tolerance"] is None:
        return f"not judged: less than {LIGHT_SHARE:.0%} of the step"
    return "" if phase["within"] else f"BEYOND {phase['tolerance']:.0%}"
