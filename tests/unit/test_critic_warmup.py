"""Iterations that train critics alone, before the actor's first update: calls, returns, state, and rules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridengine.algorithms.across import ONE_PROCESS
from hybridengine.config import load_config
from hybridengine.config.algorithm import algorithm_class
from hybridengine.drivers import advantages
from hybridengine.drivers.ppo import Ppo
from hybridengine.planning.costs import dataflows
from tests.unit.test_config import problems_of
from tests.unit.test_dataflow_functions import (
    KEPT,
    ROWS,
    SAMPLES,
    SETTINGS,
    assert_rows,
    returns_of,
    rewards_of,
)
from workers.model_worker import TrainedWorker

NAMES = ("ppo", "async_ppo", "safe_rlhf")


def iterate(algorithm: Ppo, num_steps: int) -> tuple[list[list[str]], list[Any], dict[str, float]]:
    """Return the updates of each iteration, the algorithm that its advantages got, and the state at the end."""
    updates, used, state = list[list[str]](), list[Any](), dict[str, float]()
    for step in range(1, num_steps + 1):
        trace = dataflows._Trace(8)
        groups: dict[str, Any] = {
            role: (dataflows._Engines if role == "generation" else dataflows._Group)(trace, role)
            for role in (*algorithm.roles, *dataflows.HELPERS)
        }

        def compute(rows: Any, path: str, algorithm: Ppo, *more: Any) -> Any:
            used.append(algorithm)
            return rows

        def measure(rows: Any, path: str, *more: Any) -> Any:
            return SimpleNamespace(get=lambda: [{"kl/mean": 3.0, "cost/mean": 1.0}], wait=lambda: None)

        groups["compute"] = SimpleNamespace(map=compute, measure=measure)
        prompts = dataflows._Result(trace, 4)
        sampling = SimpleNamespace(
            step=step, num_prompts=4, samples_per_prompt=2, first_seed=0, prompts=prompts
        )
        algorithm.step(
            SimpleNamespace(**groups, term_columns=(), episode_columns=()),  # type: ignore[arg-type]
            sampling,  # type: ignore[arg-type]
            state,
        )
        updates.append([call.role for call in trace.calls if call.method == "update"])
    return updates, used, state


@pytest.mark.parametrize("name", NAMES)
def test_critics_alone_are_trained_first(name: str) -> None:
    """The actor's losses, its KL controller and the multiplier of costs begin afterwards."""
    options = {"critic_warmup": 2, "lam": 0.9, "kl_controller": {"target": 0.1, "rate": 1.0}}
    kind: Any = algorithm_class(name)
    updates, used, state = iterate(kind(**options), 4)
    critics = [role for role in kind.roles if role.endswith("critic")]
    assert updates == [critics] * 2 + [[*critics, "actor"]] * 2
    assert [one.critic_lam for one in used] == [1.0, 1.0, None, None]
    assert [one.kl_coef for one in used] == pytest.approx([0.05, 0.05, 0.05, 0.05 * 1.2])
    _, _, later = iterate(kind(**options | {"critic_warmup": 0}), 2)
    assert state == pytest.approx(later), "as if the run had begun with the third iteration"


def test_their_returns_are_sums_of_rewards() -> None:
    """Whatever the values are: an untrained critic does not learn from itself."""
    algorithm = SETTINGS.model_copy(update={"critic_warmup": 1})
    present = algorithm.present({}, SimpleNamespace(step=1))  # type: ignore[arg-type]
    found = advantages.ppo(ROWS.clone(), ONE_PROCESS, present, SAMPLES)
    assert_rows(found["returns"], {row: returns_of(rewards_of(row), 0.9) for row in KEPT})
    afterwards = algorithm.present({}, SimpleNamespace(step=2))  # type: ignore[arg-type]
    assert afterwards is algorithm


@pytest.mark.parametrize("name", NAMES)
def test_the_planner_sees_an_iteration_that_updates_all_roles(name: str) -> None:
    kind: Any = algorithm_class(name)
    assert dataflows.calls_of(kind(critic_warmup=3), 5, 3) == dataflows.calls_of(kind(), 5, 3)


def test_an_actor_that_is_never_updated_is_refused(built: Path) -> None:
    assert (
        load_config(built, ["run.steps=3", "algorithm.critic_warmup=2"]).algorithm.first_update("actor") == 3
    )
    assert problems_of(
        built, "run.steps=3", "algorithm.critic_warmup=3", "actor.optimizer.warmup_steps=1"
    ) == ["algorithm.critic_warmup=3 must be fewer than run.steps=3; choose at most 2, or raise run.steps"]
    (message,) = problems_of(
        built, "algorithm.name=grpo", "algorithm.critic_warmup=1", "rollout.samples_per_prompt=2"
    )
    assert message.startswith("unknown key algorithm.critic_warmup")


def test_schedules_end_with_the_run(built: Path) -> None:
    """The actor's has as many optimizer steps as its own iterations make."""
    changes = ["run.steps=10", "algorithm.critic_warmup=4", "actor.ppo_epochs=2", "critic.ppo_epochs=3"]
    (message,) = problems_of(built, *changes, "actor.optimizer.warmup_steps=12")
    assert "actor.optimizer.warmup_steps=12 must be fewer than the run's 12 optimizer steps" in message
    config, lengths = load_config(built, changes), dict[str, int]()
    for role in ("actor", "critic"):

        def start(settings: object, steps: int, offload: str, role: str = role) -> None:
            lengths[role] = steps

        worker: Any = SimpleNamespace(
            run=config,
            section=getattr(config, role),
            context=SimpleNamespace(role=role),
            trainer=SimpleNamespace(start_optimizer=start),
        )
        TrainedWorker.start_optimizer(worker)
    assert lengths == {"actor": 12, "critic": 30}
