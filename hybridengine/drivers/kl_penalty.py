"""Penalty of the KL divergence from the reference on each token's reward, with a fixed or an adaptive weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from hybridengine.config.algorithm import Algorithm, Conflict
from hybridengine.config.values import NonNegative, Positive, Section
from hybridengine.drivers.roles import State
from hybridengine.report import keys

STATE = "kl_coef"
"""Key of the present weight in the state of a dataflow."""
MAX_ERROR = 0.2
"""Largest relative error that the controller takes into account, of either sign."""


class KlControllerSection(Section):
    """Controller of the KL penalty's weight."""

    target: Positive
    """Mean KL divergence per token that the weight is adapted to, by `algorithm.kl_estimator`."""
    rate: Positive = 0.1
    """Relative change of the weight in an iteration, in multiples of the KL divergence's relative error, which counts up
    to 0.2."""


class KlPenalty(Algorithm):
    """Base of the algorithms whose rewards have a KL penalty."""

    kl_coef: NonNegative = 0.05
    """Weight of the KL penalty on each token's reward."""
    kl_controller: KlControllerSection | None = None
    """Adaptation of the weight, which `kl_coef` is then the first value of; none by default."""

    def penalised(self, state: State) -> Self:
        """Return the algorithm with the present weight, which `state` has from the first adaptation on."""
        return (
            self if self.kl_controller is None else self.model_copy(update={"kl_coef": self._weight(state)})
        )

    def adapt(self, state: State, metrics: Mapping[str, float]) -> dict[str, float]:
        """Change the weight in `state` by the `metrics` of a batch; return the weight that its rewards had, as a metric.

        With the KL divergence D and its target T, the weight is multiplied by 1 + rate·clip(D/T - 1, -0.2, 0.2).

        Source: arXiv 1909.08593, section 2.2, whose D is that of whole responses.
        """
        control = self.kl_controller
        if control is None:
            return {}
        weight = self._weight(state)
        error = metrics[keys.KL_MEAN] / control.target - 1.0
        state[STATE] = weight * (1.0 + control.rate * min(max(error, -MAX_ERROR), MAX_ERROR))
        return {keys.KL_COEF: weight}

    def _weight(self, state: State) -> float:
        return state.get(STATE, self.kl_coef)

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield a controller that has nothing to adapt, or would turn the penalty's sign."""
        yield from super().conflicts(config)
        if self.kl_controller is None:
            return
        if not self.kl_coef:
            yield Conflict(
                "algorithm.kl_controller multiplies algorithm.kl_coef=0, which remains 0; choose a first value above 0,"
                " or leave the controller out",
                ("algorithm.kl_controller", "algorithm.kl_coef"),
            )
        if (rate := self.kl_controller.rate) >= 1 / MAX_ERROR:
            yield Conflict(
                f"algorithm.kl_controller.rate={rate:g} could make the weight of the penalty 0 or negative; choose less"
                f" than {1 / MAX_ERROR:g}",
                ("algorithm.kl_controller.rate",),
            )
