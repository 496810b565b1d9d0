"""Every dataflow on real ranks, one iteration each on the same groups: Megatron, vLLM, the critics and the scorers."""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from hybridengine.backends.megatron import compat
from hybridengine.checkpoints.folders import checkpoints_in
from hybridengine.cli import iterations as iterations_module
from hybridengine.cli.iterations import iterate
from hybridengine.cli.prepare import RunFiles, claim_run, prepare_files
from hybridengine.cli.run_output import RunOutput
from hybridengine.cli.stopping import StopRequest
from hybridengine.config import RunConfig, load_config
from hybridengine.config.algorithm_sections import ALGORITHM_ROLES, CorrectionSection
from hybridengine.controller.exchange import row_exchange
from hybridengine.controller.failures import RankFailedError
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.data.epochs import shuffled_rows
from hybridengine.drivers.dataflow import Step, load_step
from hybridengine.drivers.launch import RunPools
from hybridengine.drivers.roles import Roles, Sampling, Scorers, State
from hybridengine.drivers.saving import Progress, RunSaver
from hybridengine.errors import ConfigError, DataError, StorageError
from hybridengine.metrics import keys
from hybridengine.metrics.rows import Row, read_rows
from hybridengine.metrics.timeline import TIMELINE_FILE, read_timeline
from tests.full.tiny_runs import SECTIONS, value

pytestmark = pytest.mark.timeout(600)

PROMPTS, SAMPLES = 8, 4
COST_LIMIT, MULTIPLIER_LR = 20.0, 0.1


@dataclass(frozen=True)
class Started:
    """Groups for all roles that any dataflow has."""

    config: RunConfig
    files: RunFiles
    pools: RunPools
    roles: Roles


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, ray_cluster: int) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("dataflows")
    changes = {
        "run": {"steps": 1, "seed": 3, "folder": str(folder / "runs")},
        "warmup": None,
        "algorithm": {"name": "safe_rlhf", "cost_limit": COST_LIMIT, "multiplier_lr": MULTIPLIER_LR},
        # An untrained model has no right answers, but responses of several lengths; short ones are to be better.
        "reward": {"terms": {"short": {"function": "hybridengine.data.tasks:length_cost", "weight": -1.0}}},
        "cost": {"terms": {"tokens": {"function": "hybridengine.data.tasks:length_cost", "weight": 2.0}}},
        "cost_critic": SECTIONS["critic"],
        "actor": SECTIONS["actor"] | {"kl_loss_coef": 0.01},
    }
    (folder / "all.yaml").write_text(yaml.safe_dump(SECTIONS | changes))
    config, _ = claim_run(load_config(folder / "all.yaml"))
    files = prepare_files(config)
    with RunPools(config) as pools:
        pools.start()
        actor = pools.start_actor(folder=config.model_folder, stop_token_ids=files.stop_token_ids)
        actor.start_training()
        yield Started(config, files, pools, pools.start_roles(actor))


def one_step(
    started: Started,
    name: str,
    state: State,
    step: int = 1,
    num_prompts: int = PROMPTS,
    num_samples: int = SAMPLES,
    **settings: object,
) -> dict[str, float]:
    """Metrics of an iteration, with 32 rows unless told."""
    algorithm = started.config.algorithm.model_copy(update={"name": name, **settings})
    sampling = Sampling(
        step=step, num_prompts=num_prompts, samples_per_prompt=num_samples, first_seed=100 * step
    )
    metrics = load_step(algorithm)(started.roles, sampling, algorithm, state)
    started.pools.wait()
    return metrics


def test_a_runs_configuration_lies_beside_it_and_can_be_run_again(started: Started) -> None:
    assert load_config(started.config.run_folder / "config.yaml") == started.config


@pytest.mark.parametrize("name", ALGORITHM_ROLES)
def test_an_iteration(started: Started, name: str) -> None:
    exchange = row_exchange()
    started.pools.wait()
    exchange.take_records()
    payload = exchange.payload_bytes
    state = State()
    metrics = one_step(started, name, state)
    called = {record.role for record in exchange.take_records()}
    assert called - {"prompts", "compute"} == set(ALGORITHM_ROLES[name])
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rollout/dropped_rows"] == 0
    assert metrics["reward/short_mean"] == pytest.approx(-metrics["reward/mean"]), (
        "the only term, weighted by -1"
    )
    assert ("cost/tokens_mean" in metrics) == (name == "safe_rlhf")
    if name == "grpo_from_engine":  # nobody asks the trainer
        assert keys.LOG_PROB_ABS_DIFF_MAX not in metrics
    else:
        assert metrics[keys.LOG_PROB_ABS_DIFF_MAX] < 1e-3
    assert metrics["actor/grad_norm"] > 0
    rows = PROMPTS * SAMPLES
    # Online DPO picks pairs by scores [rows] float32 and whether they were dropped [rows] bool; no other fetches rows.
    assert exchange.payload_bytes - payload == (rows * (4 + 1) if name == "online_dpo" else 0)
    for role in ("critic", "cost_critic"):
        assert (f"{role}/grad_norm" in metrics) == (role in ALGORITHM_ROLES[name])


def test_engines_with_different_numbers_of_rows(started: Started) -> None:
    """18 rows on 4 engines: trainer and engines agree on every row, so each is where it belongs."""
    metrics = one_step(started, "grpo", State(), num_prompts=6, num_samples=3)
    assert started.roles.actor.num_ranks == 4
    assert metrics[keys.LOG_PROB_ABS_DIFF_MAX] < 1e-3
    assert metrics["rollout/dropped_rows"] == 0


def test_the_multiplier_follows_the_mean_cost(started: Started) -> None:
    """ln lam += lr·lam·(J_c - d): arXiv 2310.12773, equation 31."""
    state = State()
    logarithm = 0.0
    for step in (1, 2):
        metrics = one_step(started, "safe_rlhf", state, step)
        logarithm += MULTIPLIER_LR * math.exp(logarithm) * (metrics["cost/mean"] - COST_LIMIT)
        assert state["log_multiplier"] == pytest.approx(logarithm, rel=1e-6)
        assert metrics["cost/multiplier"] == pytest.approx(math.exp(logarithm), rel=1e-6)
    assert metrics["cost/tokens_mean"] == pytest.approx(metrics["rollout/response_tokens_mean"], rel=0.3)
    assert metrics["cost/mean"] == pytest.approx(2.0 * metrics["cost/tokens_mean"])


def test_a_correction_leaves_a_batch_on_policy_alone(started: Started) -> None:
    """Engine and trainer agree to 1e-4 here, so that weights are 1 and nothing is dropped."""
    correction = CorrectionSection(name="sequence_mis", high=1.5)
    metrics = one_step(started, "grpo", State(), correction=correction)
    assert metrics["actor/grad_norm"] > 0
    assert metrics["rollout/dropped_rows"] == 0


def test_a_role_that_the_run_does_not_have(started: Started) -> None:
    groups: dict[str, WorkerGroup] = {"actor": started.roles.actor, "prompts": started.roles.prompts}
    sampling = Sampling(step=1, num_prompts=4, samples_per_prompt=1, first_seed=0)
    with pytest.raises(
        ConfigError, match="the dataflow uses the role 'critic', and the run has actor, prompts"
    ):
        load_step(started.config.algorithm)(Roles(**groups), sampling, started.config.algorithm, State())


def test_rows_of_a_dataflow_that_nobody_has_produced(started: Started, tmp_path: Path) -> None:
    roles = started.roles
    prompts = roles.prompts.training_prompts(Sampling(1, 4, 1, 0).prompts, 1)
    with pytest.raises(Exception, match=r"actor\.update") as error:
        roles.actor.update(prompts).wait()
    assert "log_probs" in str(error.value)


def left_by(
    started: Started, roles: Roles, step: Step, name: str, error: type[BaseException], match: str
) -> tuple[list[Row], set[tuple[int | None, str]]]:
    """Rows of metrics and (step, bar) of the timeline that a run leaves which fails with an error."""
    own = started.config.run.model_copy(update={"name": name})
    config = started.config.model_copy(update={"run": own})
    config.run_folder.mkdir()
    progress = Progress.start()
    saver = RunSaver(config, roles, progress, print)
    with (
        pytest.raises(error, match=match),
        RunOutput(
            config, started.pools.nodes, started.files.tokenizer, Console(file=io.StringIO())
        ) as output,
    ):
        iterate(config, step, started.pools, roles, started.files, output, progress, saver, StopRequest())
    spans = read_timeline(config.run_folder / TIMELINE_FILE).spans
    return read_rows(config.run_folder), {(span.step, span.name) for span in spans}


def test_prompts_go_on_after_those_that_were_drawn(started: Started) -> None:
    """19 of them in 3 steps, by batches of other sizes."""
    prompts = started.roles.prompts
    prompts.go_on_after(3, 19).wait()
    try:
        found = [
            prompts.training_prompts(Sampling(step, 8, 1, 0).prompts, step).get("row_ids") for step in (4, 5)
        ]
    finally:
        prompts.go_on_after(0, 0).wait()
    num_rows, seed = len(started.files.prompts), started.config.run.seed
    stream = [row for step in range(5) for row in shuffled_rows(num_rows, 8, seed, step)]
    assert [row for rows in found for row in rows["row_ids"].tolist()] == stream[19 : 19 + 16]


@pytest.mark.parametrize("every", [1, 5])
def test_who_asks_to_stop_while_a_step_is_being_saved_loses_nothing(
    started: Started, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal after the run has looked for one: where a checkpoint is due, and where none is."""
    own = started.config.run.model_copy(update={"name": f"stopped-{every}", "steps": 3})
    saved = started.config.checkpoint.model_copy(update={"every": every})
    config = started.config.model_copy(update={"run": own, "checkpoint": saved})
    config.run_folder.mkdir()
    progress, stop, output = Progress.start(), StopRequest(), Console(file=io.StringIO())
    saver = RunSaver(config, started.roles, progress, print)
    poll = saver._poll

    def interrupted() -> None:
        if not stop.asked:
            os.kill(os.getpid(), signal.SIGINT)
        poll()

    monkeypatch.setattr(saver, "_poll", interrupted)
    with RunOutput(config, started.pools.nodes, started.files.tokenizer, output) as shown, stop.listening():
        iterate(
            config, does_nothing, started.pools, started.roles, started.files, shown, progress, saver, stop
        )
    assert stop.asked and progress.step == 1
    (checkpoint,) = checkpoints_in(config.run_folder)
    checkpoint.check()
    assert checkpoint.step == 1
    assert [one.name for one in checkpoint.folder.parent.iterdir()] == ["step-00000001"]


@contextlib.contextmanager
def writers(started: Started, change: str) -> Iterator[None]:
    """While open, all ranks write checkpoints as this function of this module has it."""
    rows = started.roles.prompts.training_prompts(Sampling(1, 4, 1, 0).prompts, 1).select("prompt_lengths")
    started.roles.compute.measure(rows, f"{__name__}.{change}").get()
    try:
        yield
    finally:
        started.roles.compute.measure(rows, f"{__name__}.write_as_ever").get()


WRITE = compat.write_save


def write_slowly(rows: object, across: object) -> dict[str, float]:
    def slowly(request: Any) -> None:
        time.sleep(4)
        WRITE(request)

    compat.write_save = slowly
    return {}


def write_as_ever(rows: object, across: object) -> dict[str, float]:
    compat.write_save = WRITE
    return {}


@pytest.mark.parametrize(("save_s", "saved"), [(60, True), (1, False)])
def test_a_save_may_take_longer_than_a_call(
    save_s: int, saved: bool, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call may take 3 s here, and a rank takes 4 to write."""
    own = started.config.run.model_copy(update={"name": f"slow-{save_s}"})
    timeouts = started.config.timeouts.model_copy(update={"save_s": save_s})
    config = started.config.model_copy(update={"run": own, "timeouts": timeouts})
    config.run_folder.mkdir()
    monkeypatch.setattr(started.roles.actor, "timeout_s", 3.0)
    said: list[str] = []
    progress = Progress.start()
    saver = RunSaver(config, started.roles, progress, said.append)
    progress.step = 1
    with writers(started, "write_slowly"):
        saver.after_step({}, last=True)
        if not saved:  # ranks that are late are left to end before others write as ever
            time.sleep(4)
    assert (saver.saved_step == 1) is saved
    (told,) = said
    if saved:
        assert told.startswith("checkpoint of step 1 saved: ")
    else:
        assert "no checkpoint of step 1: " in told and "has not ended in time; raise timeouts.save_s" in told


def test_a_state_that_no_checkpoint_can_have(started: Started) -> None:
    def keeps_text(roles: object, sampling: object, settings: object, state: State) -> dict[str, float]:
        state["phase"] = "warm"  # type: ignore[assignment]
        return {"loss": 1.0}

    match = r"step 1 of .* keeps \"phase\"=\"warm\" in its state; keep names and"
    left_by(started, started.roles, keeps_text, "kept", ConfigError, match)


def does_nothing(*_: object) -> dict[str, float]:
    return {"loss": 1.0}


def mistyped(roles: Roles, sampling: Sampling, settings: object, state: State) -> dict[str, float]:
    prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step)
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
        (returns_several, "returned losses=.*; return its metrics, a dict of numbers"),
        (returns_the_step, "returned a metric called \"step\"; .* names, others than 'step'"),
    ],
)
def test_metrics_that_are_none_leave_what_is_known_of_the_step(
    started: Started, step: Step, match: str
) -> None:
    rows, _ = left_by(started, started.roles, step, step.__name__, ConfigError, match)
    assert [row[keys.STEP] for row in rows] == [0, 1]
    assert "reward/calls" in rows[1]


@pytest.mark.parametrize(
    ("step", "error", "match"),
    [
        (
            mistyped,
            ConfigError,
            "'compute_logprobs' is no registered method of 'actor'; did you mean compute_log_probs",
        ),
        (divides_by_zero, ZeroDivisionError, "division"),
        (returns_nothing, ConfigError, "returned null; return its metrics"),
    ],
)
def test_a_dataflow_that_fails_leaves_what_is_known_of_its_step(
    started: Started, step: Step, error: type[Exception], match: str
) -> None:
    rows, bars = left_by(started, started.roles, step, step.__name__, error, match)
    assert [row[keys.STEP] for row in rows] == [0, 1]
    assert keys.SCORE_MEAN in rows[0]
    assert keys.EXACT_MATCH not in rows[0], "nobody knows a full score of several terms"
    assert "reward/calls" in rows[1]
    assert {(0, "actor.generate_sequences"), (1, "prompts.training_prompts")} <= bars


def test_an_evaluation_that_fails_leaves_what_is_known_of_it(started: Started) -> None:
    section = started.config.reward.model_copy(update={"terms": None, "function": "math:pow"})
    failing = WorkerGroup(
        started.roles.actor.pool,
        "workers.reward.RewardFunctionWorker",
        role="failing",
        parallel="1-1-4",
        config={"run": started.config.model_copy(update={"reward": section}), "section": "reward"},
    )
    reward = Scorers([failing], started.roles.compute, {})
    roles = Roles(**started.roles.__dict__ | {"reward": reward})
    rows, bars = left_by(
        started, roles, returns_nothing, "unjudged", RankFailedError, "reward.function=math:pow, row"
    )
    assert [row[keys.STEP] for row in rows] == [0]
    assert value(rows[0], "reward/failures") > 0
    assert (0, "actor.generate_sequences") in bars


def counts_to_three(roles: Roles, sampling: Sampling, settings: object, state: State) -> dict[str, float]:
    roles.prompts.training_prompts(sampling.prompts, sampling.step).get("prompt_lengths")
    return {"counted": 3.0}


@pytest.mark.parametrize("error", [DataError("nobody judges"), KeyboardInterrupt()], ids=repr)
def test_a_step_keeps_its_metrics_when_the_evaluation_after_it_does_not_end(
    started: Started, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    evaluations = iter([({"eval/score_mean": 0.5}, None), error])

    def evaluate(*_: object) -> Any:
        result = next(evaluations)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(iterations_module, "evaluate", evaluate)
    monkeypatch.setattr(RunOutput, "show_samples", lambda *_: None)
    name = f"unjudged-{type(error).__name__}"
    rows, bars = left_by(started, started.roles, counts_to_three, name, type(error), ".*")
    assert [row[keys.STEP] for row in rows] == [0, 1]
    assert (rows[1]["counted"], keys.SCORE_MEAN in rows[1]) == (3.0, False)
    assert value(rows[1], keys.STEP_S) > 0
    assert ("reward/calls" in rows[1]) == isinstance(error, DataError)  # who interrupts waits for nobody
    assert (1, "prompts.training_prompts") in bars


def test_a_step_keeps_its_metrics_when_nobody_can_say_what_the_functions_did(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one that asks finds a rank gone, and the one that asks for last words is interrupted."""
    monkeypatch.setattr(iterations_module, "evaluate", lambda *_: ({"eval/score_mean": 0.5}, None))
    monkeypatch.setattr(RunOutput, "show_samples", lambda *_: None)
    answers = iter([{}, DataError("a rank is gone"), KeyboardInterrupt()])

    def take(*_: object) -> Any:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(Roles, "take_scorer_metrics", take)
    rows, _ = left_by(started, started.roles, counts_to_three, "unasked", KeyboardInterrupt, ".*")
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
        lambda: actor.update_supervised(rollout),
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
