"""Saves between the steps of a dataflow, and events that end or delay them."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridengine.backends.megatron import checkpoint
from hybridengine.checkpoints.folders import checkpoints_in
from hybridengine.data.datasets import rows_after
from hybridengine.drivers.roles import Roles, Sampling, State
from hybridengine.drivers.safe_rlhf import SafeRlhf
from hybridengine.errors import ConfigError
from hybridengine.report import keys
from hybridengine.report.step_rows import read_rows
from hybridengine.training.saving import Progress, RunSaver
from hybridengine.training.stopping import StopRequest
from tests.full.dataflows.shared import COST_LIMIT, MULTIPLIER_LR, Started, go_on, left_by, own_run
from tests.full.tiny_runs import value

pytestmark = pytest.mark.timeout(600)


def test_prompts_go_on_after_those_that_were_drawn(started: Started) -> None:
    """19 prompts in 3 steps, with batches of different sizes."""
    prompts = started.roles.prompts
    prompts.go_on_after(3, 19).wait()
    try:
        found = [
            prompts.training_prompts(Sampling(step, 8, 1, 0).prompts, step).get("row_ids") for step in (4, 5)
        ]
    finally:
        prompts.go_on_after(0, 0).wait()
    num_rows, seed = len(started.files.prompts), started.config.run.seed
    stream = rows_after(num_rows, 5 * 8, seed, 0)
    assert [row for rows in found for row in rows["row_ids"].tolist()] == stream[19 : 19 + 16]


@pytest.mark.parametrize("every", [1, 5])
def test_who_asks_to_stop_while_a_step_is_being_saved_loses_nothing(
    started: Started, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal arrives after the run has checked for one, with and without a checkpoint due."""
    config = own_run(started, f"stopped-{every}", run={"steps": 3}, checkpoint={"every": every})
    progress, stop = Progress(), StopRequest()
    saver = RunSaver(config, started.roles, progress, print)
    poll = saver._poll

    def interrupted(last: bool = False) -> None:
        if not stop.asked:
            os.kill(os.getpid(), signal.SIGINT)
        poll(last)

    monkeypatch.setattr(saver, "_poll", interrupted)
    with stop.listening():
        go_on(started, config, does_nothing, progress, saver, stop)
    assert stop.asked and progress.step == 1
    (checkpoint,) = checkpoints_in(config.run_folder)
    checkpoint.check()
    assert checkpoint.step == 1
    assert [one.name for one in checkpoint.folder.parent.iterdir()] == ["step-00000001"]


@contextlib.contextmanager
def writers(started: Started, change: str) -> Iterator[None]:
    """While open, all ranks write checkpoints with this function of this module."""
    rows = started.roles.prompts.training_prompts(Sampling(1, 4, 1, 0).prompts, 1).select("prompt_lengths")
    started.roles.compute.measure(rows, f"{__name__}.{change}").get()
    try:
        yield
    finally:
        started.roles.compute.measure(rows, f"{__name__}.write_as_ever").get()


WRITE = checkpoint._RankWriter.write_data


CALL_S, WRITE_S = 8.0, 12.0
"""Limit of a call, and seconds that a rank takes to write."""


def write_slowly(rows: object, across: object) -> dict[str, float]:
    def slowly(*arguments: Any) -> Any:
        time.sleep(WRITE_S)
        return WRITE(*arguments)

    checkpoint._RankWriter.write_data = slowly  # type: ignore[method-assign]
    return {}


def write_as_ever(rows: object, across: object) -> dict[str, float]:
    checkpoint._RankWriter.write_data = WRITE  # type: ignore[method-assign]
    return {}


@pytest.mark.parametrize(("save_s", "saved"), [(60, True), (1, False)])
def test_a_save_may_take_longer_than_a_call(
    save_s: int, saved: bool, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = own_run(started, f"slow-{save_s}", timeouts={"save_s": save_s})
    monkeypatch.setattr(started.roles.actor, "timeout_s", CALL_S)
    said: list[str] = []
    progress = Progress()
    saver = RunSaver(config, started.roles, progress, said.append)
    progress.step = 1
    with writers(started, "write_slowly"):
        saver.after_step({}, last=True)
        if not saved:  # no second copy is made meanwhile
            progress.step = 2
            saver.after_step({}, last=True)
            told = said.pop()
            assert re.search(r"earlier save of \w+ is still being written; see whether the disk hangs", told)
            time.sleep(WRITE_S)  # lets slow ranks finish before the others write normally again
    assert (saver.saved_step == 1) is saved
    (told,) = said
    if saved:
        assert told.startswith("checkpoint of step 1 saved: ")
    else:
        assert "no checkpoint of step 1: " in told and "has not ended in time; raise timeouts.save_s" in told


def does_nothing(*_: object) -> dict[str, float]:
    return {"loss": 1.0}


def multiplied(roles: Roles, sampling: Sampling, algorithm: Any, state: State) -> dict[str, float]:
    return SafeRlhf.step(algorithm, roles, sampling, state)


def test_the_multiplier_and_the_best_go_on_from_a_checkpoint(started: Started) -> None:
    """ln lam += lr·lam·(J_c - d) over three steps (arXiv 2310.12773, equation 31), divided between two runs."""
    two = own_run(started, "multiplied", run={"steps": 2}, checkpoint={"every": 2, "best": "cost/mean"})
    three = two.model_copy(update={"run": two.run.model_copy(update={"steps": 3})})
    progress = Progress()
    for config in (two, three):
        saver = RunSaver(config, started.roles, progress, print)
        go_on(started, config, multiplied, progress, saver)
        newest = checkpoints_in(config.run_folder)[0]
        assert newest.step == config.run.steps
        progress = Progress.at(newest, "cost/mean")
    rows = read_rows(two.run_folder)
    assert [row[keys.STEP] for row in rows] == [0, 1, 2, 3]
    logarithm = 0.0
    for row in rows[1:]:
        logarithm += MULTIPLIER_LR * math.exp(logarithm) * (value(row, "cost/mean") - COST_LIMIT)
        assert row["cost/multiplier"] == pytest.approx(math.exp(logarithm), rel=1e-6)
    assert progress.state["log_multiplier"] == pytest.approx(logarithm, rel=1e-6)
    # Only saved steps can be the best.
    assert progress.best.value == max(value(rows[step], "cost/mean") for step in (2, 3))


@pytest.mark.parametrize(
    ("best", "warned"),
    [("eval/score_mean", False), ("eval/score", True), ("loss", False), ("los", True), (None, False)],
)
def test_a_best_metric_that_the_run_does_not_have_is_told_once(
    started: Started, best: str | None, warned: bool
) -> None:
    config = own_run(started, f"best-{str(best).replace('/', '-')}", checkpoint={"best": best})
    said: list[str] = []
    saver = RunSaver(config, started.roles, Progress(), said.append)
    saver._rate({"loss": 1.0})
    saver._rate({"loss": 1.0, "eval/score_mean": 0.5})
    saver._rate({"loss": 1.0, "eval/score_mean": 0.5})
    assert [text.split(", so that")[0] for text in said] == [
        f"warning: checkpoint.best={best} is not a metric of this run"
    ] * warned


def test_a_role_that_cannot_begin_to_save(started: Started, tmp_path: Path) -> None:
    """Saves that the other roles have begun are ended, so that the next save is complete."""
    config, roles = own_run(started, "not-begun"), started.roles
    said: list[str] = []
    progress = Progress()
    saver = RunSaver(config, roles, progress, said.append)
    with writers(started, "write_slowly"):
        roles.actor.begin_save(str(tmp_path)).wait()
        progress.step = 1
        saver.after_step({}, last=True)
        while roles.actor.end_save(False).get()[0] is False:
            time.sleep(0.05)
    progress.step = 2
    saver.after_step({}, last=True)
    refused, told = said
    assert "no checkpoint of step 1: an earlier save of actor is still being written" in refused
    assert told.startswith("checkpoint of step 2 saved: ")
    assert [one.step for one in checkpoints_in(config.run_folder)] == [saver.saved_step] == [2]


def test_a_state_that_no_checkpoint_can_have(started: Started) -> None:
    def keeps_text(roles: object, sampling: object, settings: object, state: State) -> dict[str, float]:
        state["phase"] = "warm"  # type: ignore[assignment]
        return {"loss": 1.0}

    match = r"step 1 of .* keeps in its state phase=\"warm\"; keep names"
    left_by(started, started.roles, keeps_text, "kept", ConfigError, match)
