"""Fitting of the cost model's coefficients to the measured times of runs.

Peak rates and links are measured separately. The other coefficients are fitted to the seconds of whole phases by robust
least squares on the logarithms of predicted over measured seconds, so that one disturbed phase has little influence.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hybridengine.config import RunConfig
from hybridengine.errors import ConfigError
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.dataflows import Work
from hybridengine.planning.costs.passes import compute_of
from hybridengine.planning.costs.workload import Workload
from hybridengine.planning.search.options import pricer_of
from hybridengine.planning.search.plan import Plan, given_plan
from hybridengine.planning.switch.switch_cost import SwitchPricer

RANGES: Mapping[str, tuple[float, float, float]] = {
    "efficiency": (0.5, 0.02, 1.0),
    "half_tokens": (64.0, 1.0, 4096.0),
    "attention_efficiency": (0.1, 1e-3, 1.0),
    "activation_passes": (12.0, 1.0, 500.0),
    "layer_s": (3e-4, 1e-6, 0.1),
    "micro_batch_s": (1e-3, 1e-6, 0.1),
    "decode_efficiency": (0.5, 0.01, 1.0),
    "knee": (2.0, 1.0, 16.0),
    "decode_step_s": (1e-3, 1e-6, 0.1),
    "decode_row_s": (1e-5, 1e-8, 1e-2),
    "decode_layer_s": (3e-4, 1e-6, 0.1),
    "parameter_s": (1e-4, 1e-7, 0.1),
    "optimizer_step_s": (5e-3, 1e-6, 1.0),
    "exchange_s": (3e-4, 1e-7, 0.1),
    "collective_s": (1e-4, 1e-7, 0.1),
}
"""Initial, smallest and largest value of each coefficient."""
ROBUST_SCALE = 0.15
"""Deviation beyond which residuals are weighted less."""
LIGHT_SHARE = 0.02
"""Share of the step below which phases have `LIGHT_WEIGHT`, because they vary too much on a shared machine."""
LIGHT_WEIGHT = 0.2
PRIOR_WEIGHT = 0.03
"""Weight that keeps a coefficient at its initial value if no run depends on it."""
MOST_EVALUATIONS = 60


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """Measurements of a finished run."""

    name: str
    config: RunConfig
    workload: Workload
    """Workload with the measured lengths of prompts and responses."""
    phases_s: Mapping[str, float]
    """Seconds of each phase per step: medians over the counted steps."""
    step_s: float
    resident_bytes: int
    """Largest memory of a rank's process; 0 if the run could not read it."""
    peak_weight_bytes: int
    """Largest bytes of weights on a rank during a switch."""
    num_steps: int

    @cached_property
    def _pricer(self) -> SwitchPricer:
        return pricer_of(self.workload)

    def predicted(self, cluster: Cluster) -> Plan:
        """Return the predicted plan of the run; raise TopologyError if the planner has no costs for its sizes."""
        return given_plan(self.config, self.workload, cluster, self._pricer)

    @property
    def model_phases(self) -> list[str]:
        """Phases of calls with a model, in order, without switches, which are priced from their plans alone."""
        models = {model.name for model in self.workload.models}
        fitted = (Work.GENERATE, Work.INFER, Work.UPDATE)
        calls = [call for call in self.workload.calls if call.role in models and call.work in fitted]
        return list(dict.fromkeys(call.phase for call in calls))


def fit(cluster: Cluster, runs: Sequence[MeasuredRun]) -> Cluster:
    """Return the cluster, which has measured rates and links, with coefficients fitted to the runs."""
    num_phases = sum(len(run.model_phases) for run in runs)
    if num_phases < len(RANGES):
        raise ConfigError(
            f"{num_phases} measured phases cannot decide {len(RANGES)} coefficients; measure more runs, with other sizes"
        )
    start, low, high = np.log(list(RANGES.values())).T

    def fitted(logs: np.ndarray) -> Cluster:
        return _with_compute(cluster, **dict(zip(RANGES, np.exp(logs).tolist(), strict=True)))

    def residuals(logs: np.ndarray) -> np.ndarray:
        tried, found = fitted(logs), []
        for run in runs:
            predicted_s = run.predicted(tried).phases_s
            for phase in run.model_phases:
                weight = 1.0 if run.phases_s[phase] >= LIGHT_SHARE * run.step_s else LIGHT_WEIGHT
                found.append(weight * np.log(predicted_s[phase] / run.phases_s[phase]))
        return np.array([*found, *(PRIOR_WEIGHT * (logs - start))])

    from scipy.optimize import least_squares  # slow to import: half a second

    solved = least_squares(
        residuals, start, bounds=(low, high), loss="soft_l1", f_scale=ROBUST_SCALE, max_nfev=MOST_EVALUATIONS
    )
    found = _with_compute(fitted(solved.x), process_bytes=0)
    beside = [
        run.resident_bytes - max(pool.peak_bytes for pool in run.predicted(found).pools)
        for run in runs
        if run.resident_bytes
    ]
    return _with_compute(found, process_bytes=max(1, int(statistics.median(beside)))) if beside else found


def _with_compute(cluster: Cluster, **values: Any) -> Cluster:
    """Return the cluster with the given values in its section compute."""
    return cluster.model_copy(update={"compute": compute_of(cluster).model_copy(update=values)})
