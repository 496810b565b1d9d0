"""Coefficients of the cost model from what real runs have taken.

Peak rates and links are measured by themselves. What remains, how much of the peak a model's matrices reach and what
every layer, micro-batch, token, collective and tensor costs beside its arithmetic and bytes, follows from the seconds of
whole phases: coefficients are those that make the logarithms of predicted over measured seconds smallest (a robust least
squares, so that a single disturbed phase does not bend them).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hybridengine.config import RunConfig
from hybridengine.errors import ConfigError
from hybridengine.planning.clusters import Cluster
from hybridengine.planning.dataflows import Work
from hybridengine.planning.given import given_plan
from hybridengine.planning.options import pricer_of
from hybridengine.planning.plan import Plan
from hybridengine.planning.switch_cost import SwitchPricer
from hybridengine.planning.workload import Workload

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
"""Coefficient -> where the search for it begins, and between what it stays."""
ROBUST_SCALE = 0.15
"""Deviations beyond so much count less."""
LIGHT_SHARE = 0.02
"""Phases that take less of the step than that hardly count."""
LIGHT_WEIGHT = 0.2
PRIOR_WEIGHT = 0.03
"""Keeps a coefficient that no run says anything about where it begins."""
MOST_EVALUATIONS = 60


@dataclass(frozen=True, eq=False)
class Observation:
    """What a run with known sizes has taken."""

    name: str
    config: RunConfig
    workload: Workload
    phases_s: Mapping[str, float]
    step_s: float
    resident_bytes: int = 0
    """Most that a rank's process held; 0 where nobody knows."""

    @cached_property
    def _pricer(self) -> SwitchPricer:
        return pricer_of(self.workload)

    def predicted(self, cluster: Cluster) -> Plan:
        """What the model says of the same run."""
        return given_plan(self.config, self.workload, cluster, self._pricer)


@dataclass(frozen=True)
class Deviation:
    """Predicted over measured seconds of a phase."""

    observation: str
    phase: str
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s


@dataclass(frozen=True)
class Fit:
    """A cluster whose coefficients have been fitted, and how well they fit."""

    cluster: Cluster
    deviations: tuple[Deviation, ...]
    """Of every phase of every observation."""
    steps: tuple[Deviation, ...]
    """Of whole steps."""


def fit(cluster: Cluster, observations: Sequence[Observation], progress: Callable[[float], None]) -> Fit:
    """The cluster with coefficients that fit the observations.

    Args:
        cluster: with measured rates and links.
        progress: told of the root mean square of the deviations (natural logarithms), now and then.

    Raises:
        ConfigError: there are fewer phases than coefficients.
    """
    models = [(one, phase) for one in observations for phase in _model_phases(one)]
    if len(models) < len(RANGES):
        raise ConfigError(
            f"{len(models)} measured phases cannot decide {len(RANGES)} coefficients; measure more runs, with other sizes"
        )
    start, low, high = (np.log([values[place] for values in RANGES.values()]) for place in range(3))

    def named(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(RANGES, np.exp(logs).tolist(), strict=True))

    def residuals(logs: np.ndarray) -> np.ndarray:
        tried = with_compute(cluster, **named(logs))
        found = []
        for one in observations:
            phases = one.predicted(tried).phases_s
            for phase in _model_phases(one):
                weight = 1.0 if one.phases_s[phase] >= LIGHT_SHARE * one.step_s else LIGHT_WEIGHT
                found.append(weight * np.log(phases[phase] / one.phases_s[phase]))
        progress(float(np.sqrt(np.mean(np.square(found)))))
        return np.array([*found, *(PRIOR_WEIGHT * (logs - start))])

    from scipy.optimize import least_squares  # half a second, for those who fit

    solved = least_squares(
        residuals,
        start,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=ROBUST_SCALE,
        max_nfev=MOST_EVALUATIONS,
    )
    cluster = with_compute(cluster, **named(solved.x))
    cluster = with_compute(cluster, process_bytes=_process_bytes(cluster, observations))
    return Fit(cluster, *deviations(cluster, observations))


def deviations(
    cluster: Cluster, observations: Sequence[Observation]
) -> tuple[tuple[Deviation, ...], tuple[Deviation, ...]]:
    """Predicted beside measured seconds: of every phase, and of every step."""
    phases, steps = [], []
    for one in observations:
        plan = one.predicted(cluster)
        steps.append(Deviation(one.name, "step", one.step_s, plan.step_s))
        for phase, predicted_s in plan.phases_s.items():
            phases.append(Deviation(one.name, phase, one.phases_s[phase], predicted_s))
    return tuple(phases), tuple(steps)


def with_compute(cluster: Cluster, **values: Any) -> Cluster:
    """The cluster with other values in its section compute."""
    assert cluster.compute is not None
    compute = cluster.compute.model_copy(update=values)
    return cluster.model_copy(update={"compute": compute})


def _model_phases(one: Observation) -> list[str]:
    """Return the phases of calls with a model, in order; a switch is priced from its plan alone."""
    models = {model.name for model in one.workload.models}
    fitted = (Work.GENERATE, Work.INFER, Work.UPDATE)
    calls = [call for call in one.workload.calls if call.role in models and call.work in fitted]
    return list(dict.fromkeys(call.phase for call in calls))


def _process_bytes(cluster: Cluster, observations: Sequence[Observation]) -> int | None:
    """What processes hold beside their models: the median of the observations."""
    beside = []
    for one in observations:
        if one.resident_bytes:
            plan = one.predicted(with_compute(cluster, process_bytes=None))
            beside.append(one.resident_bytes - max(pool.peak_bytes for pool in plan.pools))
    return max(1, int(statistics.median(beside))) if beside else None
