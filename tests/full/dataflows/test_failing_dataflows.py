"""Dataflows that fail or use something that does not exist: their error messages, and the files that the run leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.controller.failures import RankFailedError
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.drivers.roles import Roles, Sampling, Scorers, State
from hybridengine.errors import ConfigError, DataError, StorageError
from hybridengine.report import keys
from hybridengine.training import iterations as iterations_module
from hybridengine.training.output import RunOutput
from tests.full.dataflows.shared import Started, Step, left_by
from tests.full.tiny_runs import value

pytestmark = pytest.mark.timeout(600)


def test_a_role_that_the_run_does_not_have(started: Started) -> None:
    groups: dict[str, Any] = {"actor": started.roles.actor, "prompts": started.roles.prompts}
    sampling = Sampling(step=1, num_prompts=4, samples_per_prompt=1, first_seed=0)
    with pytest.raises(
        ConfigError, match="the dataflow uses the role 'critic', and the run has actor, prompts"
    ):
        started.config.algorithm.step(Roles(**groups), sampling, State())


def test_rows_of_a_dataflow_that_nobody_has_produced(started: Started, tmp_path: Path) -> None:
    roles = started.roles
    prompts = roles.prompts.training_prompts(Sampling(1, 4, 1, 0).prompts, 1)
    with pytest.raises(Exception, match=r"actor\.update") as error:
        roles.actor.update(prompts).wait()
    assert "log_probs" in str(error.value)


def mistyped(roles: Roles, sampling: Sampling, settings: object, state: State) -> dict[str, float]:
    prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step)
    prompts.get("prompt_lengths")
    roles.actor.compute_logprobs(prompts)
    return {}


def divides_by_zero(roles: Roles, sampling: Sampling, settings: object, state: State) -> dict[str, float]:
    roles.prompts.training_prompts(sampling.prompts, sampling.step).get("prompt_lengths")
    return {"ratio": 1 / 0}


def returns_nothing(roles: Roles, sampling: Sampling, settings: object, state: State) -> Any:
    roles.prompts.training_prompts(sampling.prompts, sampling.step).get("prompt_lengths")


def returns_a_text(*_: object) -> Any:
    return {"loss": 1.0, "note": "good"}


def returns_several(*_: object) -> Any:
    return {"losses": torch.ones(2)}


def returns_the_step(*_: object) -> Any:
    return {"step": 3}


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (
            returns_a_text,
            'step 1 of algorithm.name=safe_rlhf returned note="good"; return its metrics, a dict of',
        ),
        (returns_several, "returned losses=.*; return its metrics, a dict of names"),
        (returns_the_step, "returned step=3; return .* names, others than 'step'"),
    ],
)
def test_metrics_that_are_none_end_the_run(started: Started, step: Step, match: str) -> None:
    rows, _ = left_by(started, started.roles, step, step.__name__, ConfigError, match)
    assert [row[keys.STEP] for row in rows] == [0]


@pytest.mark.parametrize(
    ("step", "error", "match"),
    [
        (
            mistyped,
            ConfigError,
            "'compute_logprobs' is not a registered method of 'actor'; did you mean compute_log_probs",
        ),
        (divides_by_zero, ZeroDivisionError, "division"),
        (returns_nothing, ConfigError, "returned null; return its metrics"),
    ],
)
def test_a_dataflow_that_fails_leaves_its_bars(
    started: Started, step: Step, error: type[Exception], match: str
) -> None:
    rows, bars = left_by(started, started.roles, step, step.__name__, error, match)
    assert [row[keys.STEP] for row in rows] == [0]
    assert keys.SCORE_MEAN in rows[0]
    assert keys.EXACT_MATCH not in rows[0], "nobody knows a full score of several terms"
    assert {(0, "actor.generate_sequences"), (1, "prompts.training_prompts")} <= bars


def test_an_evaluation_that_fails_leaves_its_bars(started: Started) -> None:
    section = started.config.reward.model_copy(update={"terms": None, "function": "math:pow"})
    failing = WorkerGroup(
        started.roles.actor.pool,
        "workers.reward.RewardFunctionWorker",
        role="failing",
        parallel="1-1-4",
        config={"run": started.config.model_copy(update={"reward": section}), "section": "reward"},
    )
    reward = Scorers([failing], started.roles.compute, {})
    groups: dict[str, Any] = {**started.roles.__dict__, "reward": reward}
    roles = Roles(**groups)
    rows, bars = left_by(
        started, roles, returns_nothing, "unjudged", RankFailedError, "reward.function=math:pow, row"
    )
    assert rows == []
    assert (0, "actor.generate_sequences") in bars


def counts_to_three(roles: Roles, sampling: Sampling, settings: object, state: State) -> dict[str, float]:
    roles.prompts.training_prompts(sampling.prompts, sampling.step).get("prompt_lengths")
    return {"counted": 3.0}


def in_turn(*results: Any) -> Callable[..., Any]:
    """Return a function that returns the results one after another and raises those that are exceptions."""
    left = iter(results)

    def answer(*_: object) -> Any:
        result = next(left)
        if isinstance(result, BaseException):
            raise result
        return result

    return answer


@pytest.mark.parametrize("error", [DataError("nobody judges"), KeyboardInterrupt()], ids=repr)
def test_a_step_keeps_its_metrics_when_the_evaluation_after_it_does_not_end(
    started: Started, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(iterations_module, "evaluate", in_turn(({"eval/score_mean": 0.5}, None), error))
    monkeypatch.setattr(RunOutput, "show_samples", lambda *_: None)
    name = f"unjudged-{type(error).__name__}"
    rows, bars = left_by(started, started.roles, counts_to_three, name, type(error), ".*")
    assert [row[keys.STEP] for row in rows] == [0, 1]
    assert (rows[1]["counted"], keys.SCORE_MEAN in rows[1]) == (3.0, False)
    assert value(rows[1], keys.STEP_S) > 0
    assert (1, "prompts.training_prompts") in bars


def test_a_step_keeps_its_metrics_when_nobody_can_say_what_the_functions_did(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iterations_module, "evaluate", lambda *_: ({"eval/score_mean": 0.5}, None))
    monkeypatch.setattr(RunOutput, "show_samples", lambda *_: None)
    answers = in_turn({}, DataError("a rank is gone"))
    monkeypatch.setattr(Roles, "take_scorer_metrics", answers)
    rows, _ = left_by(started, started.roles, counts_to_three, "unasked", DataError, ".*")
    assert [row[keys.STEP] for row in rows] == [0, 1]
    assert (rows[1]["counted"], rows[1][keys.SCORE_MEAN]) == (3.0, 0.5)


def test_what_needs_the_weights_is_refused_while_the_engine_has_them(
    started: Started, tmp_path: Path
) -> None:
    actor, roles = started.roles.actor, started.roles
    prompts = roles.prompts.training_prompts(Sampling(1, 8, 1, 0).prompts, 1)
    actor.switch_to_generate()
    rollout = prompts.union(actor.generate_sequences(prompts))
    for call in (
        lambda: actor.compute_log_probs(rollout),
        lambda: actor.warm_up(rollout),
        lambda: actor.export_model(str(tmp_path / "saved"), str(started.config.model_folder)),
    ):
        with pytest.raises(
            Exception, match="no weights in generation mode; switch to training first"
        ) as caught:
            call().wait()
        assert isinstance(caught.value.__cause__, StorageError)
    actor.switch_to_train()
    assert actor.compute_log_probs(rollout).get("log_probs")["log_probs"].isfinite().all()
    assert not hasattr(roles, "judge")


def test_a_kl_loss_without_the_references_log_probs(started: Started) -> None:
    actor = started.roles.actor
    prompts = started.roles.prompts.training_prompts(Sampling(1, 8, 1, 0).prompts, 1)
    actor.switch_to_generate()
    rollout = prompts.union(actor.generate_sequences(prompts))
    actor.switch_to_train()
    rollout = rollout.union(actor.compute_log_probs(rollout))
    batch = rollout.union(rollout.select_as(advantages="log_probs"))
    with pytest.raises(RankFailedError, match=r"\['ref_log_probs'\] are needed with actor.kl_loss_coef=0.01"):
        actor.update(batch).get()
