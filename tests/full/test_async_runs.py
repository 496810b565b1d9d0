"""Asynchronous runs on real ranks: two that train, and two engines of their own."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hybridengine.cli.main import main
from hybridengine.config import load_config
from hybridengine.config.run_config import CALLS_FILE
from hybridengine.data.tokenizer import load_tokenizer
from hybridengine.report import keys
from hybridengine.report.step_rows import Row, latest_rows, read_rows
from tests.full.async_faults import HANG_S, parity
from tests.full.test_faults import COMMAND, killed_at_the_end
from tests.full.tiny_runs import SECTIONS, value
from tests.warm_workers import warm_program

pytestmark = pytest.mark.timeout(900)

STEPS, ETA, LIMIT_S = 6, 2, 20
ASYNCHRONOUS: dict[str, Any] = {
    "run": {"steps": STEPS, "eval_every": 0, "seed": 7, "live": False},
    "cluster": {
        "ranks_per_node": [2],
        "pools": {"engines": {"roles": ["generation"], "ranks_per_node": [2]}},
    },
    "actor": SECTIONS["actor"] | {"parallel": "1-2-1", "mini_batches": 1},
    "reference": {"parallel": "1-1-2"},
    "generation": {"steps_per_call": 2},
    "staleness": {"max_versions": ETA},
    "algorithm": {"name": "async_grpo", "correction": {"name": "token_tis"}},
    "timeouts": {"call_s": 60},
    "reward": SECTIONS["reward"] | {"timeout_s": 10},
    "rollout": SECTIONS["rollout"] | {"top_p": 0.9, "top_k": 12},
    "checkpoint": {"every": 2},
}


@dataclass(frozen=True)
class Outcome:
    status: int
    console: str
    errors: str
    folder: Path

    @property
    def rows(self) -> list[Row]:
        """Last row of each training step."""
        return latest_rows(read_rows(self.folder))[1:]

    @property
    def weights(self) -> bytes:
        return (self.folder / "final/model.safetensors").read_bytes()


class Runs:
    """Runs of one configuration in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str, *overrides: str, **sections: Any) -> Outcome:
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status = main(["train", str(self.config(name, **sections)), *overrides])
        return Outcome(status, out.getvalue(), errors.getvalue(), self._folder / "runs" / name)

    def config(self, name: str, **sections: Any) -> Path:
        file = self._folder / f"{name}.yaml"
        without_critic = {key: section for key, section in SECTIONS.items() if key != "critic"}
        written = without_critic | ASYNCHRONOUS | sections
        written["run"] = written["run"] | {"folder": str(self._folder / "runs")}
        file.write_text(yaml.safe_dump(written))
        return file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ray_cluster: int) -> Runs:
    return Runs(tmp_path_factory.mktemp("async"))


@pytest.fixture(scope="module")
def resumed(runs: Runs, warm_ray: dict[str, str]) -> Outcome:
    """A run whose controller, engines and trainers are killed after its third step, and that is resumed."""
    folder = runs._folder / "runs/killed"
    with killed_at_the_end(warm_program(COMMAND, "train", runs.config("killed")), warm_ray):
        wait_for_rows(folder / "metrics.jsonl", 4)
    assert not (folder / "final").exists()
    outcome = runs("killed", "resume=auto")
    assert outcome.status == 0, outcome.errors
    return outcome


def wait_for_rows(file: Path, number: int) -> None:
    deadline = time.monotonic() + 300
    while not (file.exists() and len(file.read_text().splitlines()) >= number):
        assert time.monotonic() < deadline, f"{file} has not got {number} rows"
        time.sleep(0.02)


def test_a_repeated_order_of_calls_gives_the_weights_of_a_run_that_was_killed(
    runs: Runs, resumed: Outcome
) -> None:
    """The run that repeats it is not disturbed; responses were in flight at the checkpoint."""
    assert re.search(r"resuming after step [24]\b", resumed.console), resumed.console
    order = resumed.folder / CALLS_FILE
    again = runs("repeated", f"generation.replay={order}")
    assert again.status == 0, again.errors
    assert again.weights == resumed.weights
    assert (again.folder / CALLS_FILE).read_text() == order.read_text()
    calls = [
        engine for line in order.read_text().splitlines() for ended in json.loads(line)[1] for engine in ended
    ]
    assert {0, 1} == set(calls)


def test_log_probs_are_those_of_truncated_distributions(resumed: Outcome) -> None:
    assert max(value(row, keys.LOG_PROB_ABS_DIFF_MAX) for row in resumed.rows) < 1e-4
    assert all(0 < value(row, "rollout/entropy_mean") < math.log(12) for row in resumed.rows)
    # The reference has the same weights then, and its log-probs are of the same tokens.
    assert value(resumed.rows[0], keys.KL_MEAN) == pytest.approx(0, abs=1e-6)


def test_no_token_is_trained_beyond_the_bound(resumed: Outcome) -> None:
    assert "warning: the longest responses take" in resumed.console
    assert [row[keys.STEP] for row in resumed.rows] == [*range(1, STEPS + 1)]
    ages = [value(row, "staleness/age_mean") for row in resumed.rows]
    assert ages[0] == 0 < max(ages)
    for row in resumed.rows:
        shares = [value(row, f"staleness/age_{age}_share") for age in range(ETA + 1)]
        assert sum(shares) + value(row, "staleness/older_share") == pytest.approx(1)


def test_each_engine_receives_the_model_once(resumed: Outcome) -> None:
    model = load_file(resumed.folder / "final/model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in model.values())
    found = [value(row, keys.RECEIVED_BYTES) for row in resumed.rows if keys.RECEIVED_BYTES in row]
    assert found and set(found) == {num_bytes}


@pytest.mark.parametrize("in_push", [False, True])
def test_engines_that_die_leave_their_responses_to_the_others(runs: Runs, in_push: bool) -> None:
    """The order of responses is that of the prompts, and no token is older than the bound."""
    outcome = runs(
        "lost-in-push" if in_push else "lost",
        algorithm={"name": "tests.full.async_faults:LosesEngine", "dies_in": "2 4", "in_push": in_push},
        staleness={"max_versions": ETA, "bound": "response"},
        cluster={
            "ranks_per_node": [2],
            "pools": {"engines": {"roles": ["generation"], "ranks_per_node": [3]}},
        },
    )
    assert outcome.status == 0, outcome.errors + outcome.console
    assert "warning: engine 0 (pool engines.0) has ended; the other 2 go on with its" in outcome.console
    assert "warning: engine 1 (pool engines.1) has ended; the other 1 go on with its" in outcome.console
    assert "starting the ranks again" not in outcome.console
    assert [row[keys.STEP] for row in outcome.rows] == [*range(1, STEPS + 1)]
    assert max(value(row, "staleness/age_max") for row in outcome.rows) <= ETA
    assert {row["staleness/older_share"] for row in outcome.rows} == {0}


def test_prompts_of_equal_scores_are_replaced(runs: Runs, tmp_path: Path) -> None:
    """Scores in the batches are those of their own responses, of which no other prompt has two alike."""
    tries, prompts = 3, SECTIONS["data"]["batch_size"]
    outcome = runs(
        "dynamic",
        algorithm={"name": "tests.full.async_faults:WritesBatches", "folder": str(tmp_path)},
        reward={"function": "tests.full.async_faults:parity", "timeout_s": 10},
        generation={"steps_per_call": 2, "max_tries": tries},
    )
    assert outcome.status == 0, outcome.errors + outcome.console
    tokenizer = load_tokenizer(load_config(runs.config("dynamic")).tokenizer_folder)
    dropped = [value(row, "queue/dropped") for row in outcome.rows]
    assert 0 < max(dropped) <= (tries - 1) * prompts
    for step, number in enumerate(dropped, 1):
        columns = torch.load(tmp_path / f"{step}.pt")
        begins, ends = columns["prompt_lengths"], columns["prompt_lengths"] + columns["response_lengths"]
        parts = zip(columns["tokens"], begins, ends, strict=True)
        texts = tokenizer.batch_decode(
            [row[begin:end] for row, begin, end in parts], skip_special_tokens=True
        )
        assert columns["scores"].tolist() == parity(texts, texts)
        pairs = columns["scores"].view(-1, 2)
        assert (pairs[:, 0] != pairs[:, 1]).all() or number == (tries - 1) * prompts


def test_the_actor_generates_while_it_waits(runs: Runs) -> None:
    """A repetition shows that it is part of the recorded order; it trains the tokens of all three engines."""
    hybrid = {"actor": True, "steps_per_call": 2}
    first = runs("hybrid", generation=hybrid)
    assert first.status == 0, first.errors + first.console
    waits = [json.loads(line) for line in (first.folder / CALLS_FILE).read_text().splitlines()]
    assert {engine for _, ended in waits for engines in ended for engine in engines} == {0, 1, 2}
    assert 0 < max(value(row, "queue/actor_share") for row in first.rows) < 1
    again = runs("hybrid-again", generation=hybrid | {"replay": str(first.folder / CALLS_FILE)})
    assert again.status == 0, again.errors + again.console
    assert again.weights == first.weights


@pytest.mark.parametrize(("name", "hybrid"), [("grpo", False), ("grpo", True), ("ppo", False)])
def test_without_staleness_the_run_is_the_synchronous_one(runs: Runs, name: str, hybrid: bool) -> None:
    """The same prompts, seeds and weights: engines compute in other batches, so that only roundings differ."""
    run, correction = ASYNCHRONOUS["run"] | {"steps": 3}, {"name": "token_tis"}
    critic = SECTIONS["critic"] | {"parallel": "1-1-2", "mini_batches": 1}
    asynchronous = runs(
        f"strict-{name}-{hybrid}",
        run=run,
        critic=critic,
        algorithm={"name": f"async_{name}", "correction": correction},
        staleness={"max_versions": 0},
        generation={"steps_per_call": 2, "actor": hybrid},
    )
    synchronous = runs(
        f"synchronous-{name}-{hybrid}",
        run=run,
        critic=critic,
        algorithm={"name": name, "correction": correction},
        cluster={"ranks_per_node": [2]},
        staleness={},
        generation={},
    )
    assert asynchronous.status == synchronous.status == 0, asynchronous.errors + synchronous.errors
    for one, other in zip(asynchronous.rows, synchronous.rows, strict=True):
        for name in (keys.REWARD_MEAN, keys.RESPONSE_TOKENS_MEAN, "rollout/entropy_mean", "actor/grad_norm"):
            assert value(one, name) == pytest.approx(value(other, name), rel=1e-4), name
        assert value(one, "staleness/age_max") == 0
    expected = load_file(synchronous.folder / "final/model.safetensors")
    for name, tensor in load_file(asynchronous.folder / "final/model.safetensors").items():
        assert (tensor - expected[name]).abs().max() < 1e-4, name


def test_a_run_without_an_engine_left_starts_its_ranks_again(runs: Runs) -> None:
    outcome = runs("lonely", algorithm={"name": "tests.full.async_faults:LosesEngine", "dies_in": "1 2"})
    assert outcome.status in (0, 1)
    assert "starting the ranks again (1 of at most 3 times)" in outcome.console


def test_an_engine_that_hangs_is_named_and_ends_the_run(runs: Runs) -> None:
    """The process of the engine is alive. The other engine draws until the bound admits no more prompts."""
    begun_s = time.monotonic()
    outcome = runs(
        "hung",
        algorithm={"name": "tests.full.async_faults:HangsEngine", "hangs_in": 2},
        timeouts={"call_s": LIMIT_S},
        faults={"max_restarts": 0},
    )
    assert outcome.status == 1
    assert "failed in step 2; " in outcome.console
    named = rf"generation\.advance did not end within {LIMIT_S} s: 1 of 1 ranks have not answered.*\n"
    named += r"  rank 0 \(.*, pool engines\.0\): in _hang \("
    assert re.search(named, outcome.errors), outcome.errors
    assert time.monotonic() - begun_s < HANG_S / 2


def test_a_run_goes_on_with_its_own_prompts_and_order_only(
    runs: Runs, resumed: Outcome, tmp_path: Path
) -> None:
    """Each is said before ranks start, but for an order that does not fit."""
    calls = tmp_path / CALLS_FILE
    recorded = (resumed.folder / CALLS_FILE).read_text()
    calls.write_text(re.sub(r"\[\[\d", "[[9", recorded, count=1))
    other = runs("other", f"generation.replay={calls}")
    assert other.status == 2, other.errors
    assert re.search(
        r"has the end of a call of engine 9 where step \d waits; name the file of a run", other.errors
    )
    saved = min((resumed.folder / "checkpoints").iterdir())  # before the last step, with responses in flight
    again = runs("again", f"resume={saved}", "run.seed=8")
    assert again.status == 2, again.errors
    assert "were begun for other prompts: run.seed, the data, or the tokenizer has changed" in again.errors
    assert "starting" not in again.console
