"""Coefficients of the cost model from what real runs have taken.

Peak rates and links are measured by themselves. What remains, how much of the peak a model's matrices reach and what
every layer, micro-batch, token, collective and tensor costs beside its arithmetic and bytes, follows from the seconds of
whole phases: coefficients are those that make the logarithms of predicted over measured seconds smallest (a robust least
squares, so that a single disturbed phase does not bend them).
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
from hybridengine.planning.search.given import given_plan
from hybridengine.planning.search.options import pricer_of
from hybridengine.planning.search.plan import Plan
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
"""Coefficient -> start, least and greatest value of the search for it."""
ROBUST_SCALE = 0.15
"""Deviations beyond this count less."""
LIGHT_SHARE = 0.02
"""Share of the step below which phases hardly count; on a shared machine they vary too much."""
LIGHT_WEIGHT = 0.2
PRIOR_WEIGHT = 0.03
"""Keeps a coefficient that no run depends on at its start."""
MOST_EVALUATIONS = 60


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """A run that has been carried out."""

    name: str
    """Its folder."""
    config: RunConfig
    workload: Workload
    """With the lengths that its prompts and responses had."""
    phases_s: Mapping[str, float]
    """Phase -> seconds of a step, the median of the steps that count."""
    step_s: float
    resident_bytes: int
    """Most bytes that a rank's process held; 0 if the run could not read it."""
    peak_weight_bytes: int
    """Most bytes of weights that a rank held while switching."""
    num_steps: int
    """Steps that count."""

    @cached_property
    def _pricer(self) -> SwitchPricer:
        return pricer_of(self.workload)

    def predicted(self, cluster: Cluster) -> Plan:
        """Return the same run as the model predicts it.

        Raises:
            TopologyError: sizes that the planner has no costs for.
        """
        return given_plan(self.config, self.workload, cluster, self._pricer)

    @property
    def model_phases(self) -> list[str]:
        """Phases of calls with a model, in order; a switch is priced from its plan alone."""
        models = {model.name for model in self.workload.models}
        fitted = (Work.GENERATE, Work.INFER, Work.UPDATE)
        calls = [call for call in self.workload.calls if call.role in models and call.work in fitted]
        return list(dict.fromkeys(call.phase for call in calls))


def fit(cluster: Cluster, runs: Sequence[MeasuredRun]) -> Cluster:
    """Return the cluster with coefficients that fit the runs.

    Args:
        cluster: has measured rates and links.

    Raises:
        ConfigError: there are fewer phases than coefficients.
    """
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

    from scipy.optimize import least_squares  # half a second, for those who fit

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
    """Return the cluster with other values in its section compute."""
    return cluster.model_copy(update={"compute": compute_of(cluster).model_copy(update=values)})
