"""The adaptive weight of the KL penalty: its rule, its place in the state, and the rewards that it reaches."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.config.algorithm import algorithm_class
from hybridengine.drivers.kl_penalty import KlPenalty
from hybridengine.drivers.ppo import Ppo
from hybridengine.drivers.rloo import Rloo
from hybridengine.planning.costs import dataflows

CONTROLLER = {"target": 0.1, "rate": 0.5}
NAMES = ("ppo", "rloo", "remax", "reinforce_plus_plus", "safe_rlhf", "async_ppo")
"""Algorithms whose rewards have a KL penalty."""


def adapted(weight: float, divergence: float) -> float:
    """Return the next weight, by equations of arXiv 1909.08593, section 2.2."""
    return weight * (1 + 0.5 * min(max((divergence - 0.1) / 0.1, -0.2), 0.2))


@given(divergences=st.lists(st.floats(-0.5, 3.0), max_size=6), stop=st.integers(0, 6))
def test_the_rule_over_iterations_and_a_resume(divergences: list[float], stop: int) -> None:
    """The state is written and read between two iterations, as a checkpoint does, with another first value given."""
    algorithm: KlPenalty = Rloo(kl_coef=0.05, kl_controller=CONTROLLER)  # type: ignore[arg-type]
    state: dict[str, float] = {}
    weight = 0.05
    for iteration, divergence in enumerate(divergences):
        if iteration == stop:
            state = json.loads(json.dumps(state))
            algorithm = algorithm.model_copy(update={"kl_coef": 0.7} if state else {})
        assert algorithm.penalised(state).kl_coef == pytest.approx(weight)
        assert algorithm.adapt(state, {"kl/mean": divergence}) == {"kl/coefficient": pytest.approx(weight)}
        weight = adapted(weight, divergence)
    assert algorithm.penalised(state).kl_coef == pytest.approx(weight)


def test_a_fixed_weight_leaves_state_and_metrics_alone() -> None:
    algorithm, state = Ppo(kl_coef=0.3), {"mine": 1.0}
    assert algorithm.penalised(state) is algorithm
    assert algorithm.adapt(state, {"kl/mean": 9.0}) == {}
    assert state == {"mine": 1.0}


def steps(
    name: str, divergences: list[float]
) -> tuple[list[float], dict[str, float], list[dict[str, float]]]:
    """Return weights in the rewards of each iteration, the final state and all metrics, with groups that do nothing."""
    kind: Any = algorithm_class(name)
    algorithm = kind(kl_coef=0.05, kl_controller=CONTROLLER)
    weights, returned, state = [], [], dict[str, float]()
    for divergence in divergences:
        trace = dataflows._Trace(8)
        groups: dict[str, Any] = {
            role: (dataflows._Engines if role == "generation" else dataflows._Group)(trace, role)
            for role in (*algorithm.roles, *dataflows.HELPERS)
        }

        def advantages(rows: Any, path: str, algorithm: KlPenalty, *more: Any) -> Any:
            weights.append(algorithm.kl_coef)
            return rows

        def measure(rows: Any, path: str, *more: Any, divergence: float = divergence) -> Any:
            found = {"kl/mean": divergence, "cost/mean": 0.0}
            return SimpleNamespace(get=lambda: [found], wait=lambda: None)

        groups["compute"] = SimpleNamespace(map=advantages, measure=measure)
        prompts = dataflows._Result(trace, 4)
        sampling = SimpleNamespace(step=1, num_prompts=4, samples_per_prompt=2, first_seed=0, prompts=prompts)
        roles = SimpleNamespace(**groups, term_columns=(), episode_columns=())
        returned.append(algorithm.step(roles, sampling, state))
    return weights, state, returned


@pytest.mark.parametrize("name", NAMES)
def test_every_dataflow_with_a_penalty_adapts_it(name: str) -> None:
    divergences = [0.5, 0.105, 0.01, 0.1]
    weights, state, returned = steps(name, divergences)
    expected = [0.05]
    for divergence in divergences:
        expected.append(adapted(expected[-1], divergence))
    assert weights == pytest.approx(expected[:-1])
    assert [metrics["kl/coefficient"] for metrics in returned] == pytest.approx(expected[:-1])
    assert state["kl_coef"] == pytest.approx(expected[-1])
