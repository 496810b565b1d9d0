"""Faults in the middle of real runs: each is detected, reported with its place, and survived where
docs/explanation/reliability.md says so. Success means that the final weights equal those of an undisturbed run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from ray.util.placement_group import placement_group, remove_placement_group
from safetensors.torch import load_file

from hybridengine.checkpoints.folders import CHECKPOINTS_FOLDER, checkpoints_in
from hybridengine.cli.main import main
from hybridengine.controller import cluster
from hybridengine.errors import WorkerError
from hybridengine.report import keys
from hybridengine.report.step_rows import Row, latest_rows, read_rows
from hybridengine.training.run import _Run
from hybridengine.training.stopping import StopRequest
from tests.full.tiny_runs import SECTIONS, computed
from tests.warm_workers import warm_program

pytestmark = pytest.mark.timeout(900)

STEPS, EVERY, LIMIT_S = 7, 2, 20
POISONED = 4
ROOT = Path(__file__).parents[2]
COMMAND = str(Path(sys.executable).with_name("hybridengine"))
TWO_RANKS = {
    "cluster": {"ranks_per_node": [2]},
    "actor": SECTIONS["actor"] | {"parallel": "1-2-1", "mini_batches": 1},
    "critic": SECTIONS["critic"] | {"parallel": "2-1-1", "mini_batches": 1},
    "reference": {"parallel": "1-1-2"},
    "timeouts": {"call_s": LIMIT_S},
    "reward": SECTIONS["reward"] | {"timeout_s": 10},
    "checkpoint": {"every": EVERY},
}

ONE_RANK = (
    "cluster.ranks_per_node=[1]",
    "actor.parallel=1-1-1",
    "critic.parallel=1-1-1",
    "reference.parallel=1-1-1",
)
"""Overrides for a run that starts in half the time, for tests in which one rank is enough."""


@dataclass(frozen=True)
class Outcome:
    """Exit status, output and folder of a command."""

    status: int
    console: str
    errors: str
    folder: Path

    @property
    def rows(self) -> list[Row]:
        """Last row of each step, without the values that depend on the machine."""
        return computed(latest_rows(read_rows(self.folder)))

    @property
    def weights(self) -> bytes:
        return (self.folder / "final" / "model.safetensors").read_bytes()


class Runs:
    """Runs of one configuration in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str, faults: Sequence[str] = (), *overrides: str) -> Outcome:
        """Run `hybridengine train` with these faults, "STEP-FAULT"."""
        file = self.config(name, faults)
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status = main(["train", str(file), *overrides])
        return Outcome(status, out.getvalue(), errors.getvalue(), self.folder(name))

    def folder(self, name: str) -> Path:
        """Return the folder of a run."""
        return self._folder / "runs" / name

    def config(self, name: str, faults: Sequence[str] = ()) -> Path:
        """Write and return the configuration file of a run with these faults."""
        to_come = self._folder / f"{name}-faults"
        to_come.mkdir(exist_ok=True)
        for fault in faults:
            (to_come / fault).touch()
        checkpoints = self.folder(name) / CHECKPOINTS_FOLDER
        algorithm = {
            "name": "tests.full.faulty:Faulty",
            "faults": str(to_come),
            "checkpoints": str(checkpoints),
            "poisoned": POISONED,
        }
        run = SECTIONS["run"] | {
            "steps": STEPS,
            "eval_every": 4,
            "folder": str(self._folder / "runs"),
            "live": False,
        }
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(SECTIONS | TWO_RANKS | {"run": run, "algorithm": algorithm}))
        return file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ray_cluster: int) -> Runs:
    return Runs(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> Outcome:
    outcome = runs("undisturbed")
    assert outcome.status == 0, outcome.errors
    return outcome


@pytest.fixture(scope="module")
def disturbed(runs: Runs) -> Outcome:
    """One run with a killed rank, an engine that raises, a full disk during a save, and a rank that hangs."""
    faults = ["3-kill-rank-when-saved", "4-full-disk", "6-engine", "7-hang"]
    outcome = runs("disturbed", faults)
    assert outcome.status == 0, outcome.console
    return outcome


def test_a_disturbed_run_ends_with_the_rows_and_weights_of_an_undisturbed_one(
    undisturbed: Outcome, disturbed: Outcome
) -> None:
    assert [row[keys.STEP] for row in undisturbed.rows] == list(range(STEPS + 1))
    assert disturbed.rows == undisturbed.rows
    assert disturbed.weights == undisturbed.weights


def test_no_prompt_is_skipped_or_repeated(undisturbed: Outcome, disturbed: Outcome) -> None:
    """Lengths and rewards identify the prompts of a step; a checkpoint records how many have been drawn."""
    for outcome in (undisturbed, disturbed):
        newest = checkpoints_in(outcome.folder)[0]
        drawn = hashlib.sha256((outcome.folder / "data" / "train.jsonl").read_bytes()).hexdigest()
        found = newest.run_state().data
        assert found is not None and found.model_dump() == {
            "prompts_drawn": STEPS * 8,
            "batch_size": 8,
            "seed": 7,
            "sha256": drawn,
        }


REPORTS = {
    "killed rank": r"failed in step 3: \S+ died on rank 1 \(.*tp=.*, node [\d.]+\): .*Died",
    "engine": r"failed in step 6: actor\.generate_sequences failed on rank 1 \(pp=0 dp=0 tp=1, node [\d.]+\):"
    r" EngineBrokenError: an illegal memory access",
    "full disk": r"warning: no checkpoint of step 4: \S+/\.step-00000004-\w+\.partial/\w+ could not be written by rank 1:"
    r" \w+: .*; the run goes on, earlier ones are kept",
    "hang": rf"failed in step 7: \S+ did not end within {LIMIT_S} s: .*\n  rank 1 \(.*\): in _hang \(",
    "restart": r"starting the ranks again \(3 of at most 3 times\)",
}


@pytest.mark.parametrize("fault", REPORTS)
def test_every_fault_is_reported_with_role_rank_node_and_operation(fault: str, disturbed: Outcome) -> None:
    assert re.search(REPORTS[fault], disturbed.console), disturbed.console


def test_after_a_fault_the_run_goes_on_from_the_newest_whole_checkpoint(disturbed: Outcome) -> None:
    """The newest checkpoint is the last one reported as saved; the one of step 4 could not be written at first."""
    saved, restarts = 0, 0
    told = re.findall(
        r"(checkpoint of step |step-|resuming after step )(\d+)( saved| was written, but|$)",
        disturbed.console,
        re.MULTILINE,
    )
    for what, step, _ in told:
        if what.startswith("resuming"):
            restarts += 1
            assert int(step) == saved
        else:
            saved = int(step)
    assert restarts == 3


def test_a_checkpoint_that_all_ranks_have_written_is_not_lost_to_the_step_that_goes_on(
    disturbed: Outcome,
) -> None:
    """The checkpoint of step 2, whose ranks were in the middle of step 3 until one of them died."""
    _, fault, then = disturbed.console.partition("failed in step 3: ")
    assert fault and "checkpoint of step 2 saved" not in disturbed.console
    assert then.index("step-00000002 was written, but its run, or its ranks, ended") < then.index(
        "resuming after step 2\n"
    )


def test_gradients_that_are_no_numbers_are_skipped_and_counted(undisturbed: Outcome) -> None:
    counted = [row.get("actor/skipped_steps") for row in undisturbed.rows[1:]]
    assert counted == [0.0] * (POISONED - 1) + [1.0] + [0.0] * (STEPS - POISONED)
    assert all(row["critic/skipped_steps"] == 0 for row in undisturbed.rows[1:])


@pytest.fixture(scope="module")
def stopped(runs: Runs) -> Outcome:
    return runs("stopped", ["5-terminate"])


def test_sigterm_finishes_the_step_saves_and_exits_with_0(stopped: Outcome) -> None:
    assert stopped.status == 0, stopped.errors
    assert [row[keys.STEP] for row in stopped.rows] == [0, 1, 2, 3, 4, 5]
    assert [one.step for one in checkpoints_in(stopped.folder)] == [5, 4]
    assert "SIGTERM: the run ends after this step, and is saved" in stopped.errors
    assert "runs/stopped/config.yaml resume=auto resumes it" in stopped.console
    assert not (stopped.folder / "final").exists()


def test_a_step_that_cannot_be_saved_before_the_run_ends_is_no_success(runs: Runs) -> None:
    outcome = runs("unsaved", ["2-full-disk", "2-terminate"], *ONE_RANK)
    assert outcome.status == 1
    assert (
        "warning: no checkpoint of step 2: " in outcome.console
        and "nothing has been saved" in outcome.console
    )
    assert "OutputError: step 2, after which the run ends, could not be saved" in outcome.errors


def test_the_checkpoint_of_another_model_is_refused_before_ranks_start(stopped: Outcome, runs: Runs) -> None:
    resume = f"resume={checkpoints_in(stopped.folder)[0].folder}"
    outcome = runs("deeper", (), resume, "model.build.num_layers=4")
    assert outcome.status == 2
    assert "actor is the checkpoint of another model: num_layers is 3, not 4; use this" in outcome.errors
    assert not outcome.folder.exists()


def test_a_run_goes_on_with_other_sizes(stopped: Outcome, runs: Runs, undisturbed: Outcome) -> None:
    """The resumed run has half as many ranks. Metrics are equal within float tolerance: sums are in another order."""
    again = runs("stopped", (), "resume=auto", *ONE_RANK)
    assert again.status == 0, again.errors
    assert "resuming after step 5" in again.console
    assert 'actor.parallel: "1-2-1" -> "1-1-1"' in again.console
    assert [row[keys.STEP] for row in again.rows] == list(range(STEPS + 1))
    of_sizes = ("switch/", "rollout/log_prob_abs_diff_max", "reward/calls", "reward/failures")
    compared = 0
    for one, other in zip(again.rows[6:], undisturbed.rows[6:], strict=True):
        for key in {*one, *other} - {key for key in other if key.startswith(of_sizes)}:
            value, expected, where = one[key], other[key], (one[keys.STEP], key)
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-6), where
            compared += 1
    assert compared > 25 * 2
    weights = load_file(again.folder / "final" / "model.safetensors")
    for name, tensor in load_file(undisturbed.folder / "final" / "model.safetensors").items():
        assert (weights[name] - tensor).abs().max() < 1e-4, name


def test_a_run_that_is_complete_stays_as_it_is(undisturbed: Outcome, runs: Runs) -> None:
    before = undisturbed.weights
    again = runs("undisturbed", (), "resume=auto")
    assert again.status == 0, again.errors
    assert "nothing is left to do" in again.console
    assert undisturbed.weights == before


def test_a_run_goes_on_after_kill_9_of_everything(
    runs: Runs, undisturbed: Outcome, warm_ray: dict[str, str]
) -> None:
    """The controller, its Ray and all ranks are killed after the fourth step: during a step, a save, or in between."""
    with killed_at_the_end(warm_program(COMMAND, "train", runs.config("killed")), warm_ray):
        metrics, deadline = runs.folder("killed") / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 4):
            assert time.monotonic() < deadline, "the run has not come to its fourth step"
            time.sleep(0.02)
    assert not (runs.folder("killed") / "final").exists()
    again = runs("killed", (), "resume=auto")
    assert again.status == 0, again.errors
    assert re.search(r"resuming after step [2-6]\b", again.console), again.console
    assert again.rows == undisturbed.rows
    assert again.weights == undisturbed.weights


def test_a_cluster_that_no_longer_has_the_ranks_ends_the_run_with_both_reasons(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "node_offers", cluster.node_offers)  # restores it after the test
    outcome = runs("shrunk", ["2-a-cluster-shrinks", "2-kill-rank"], *ONE_RANK)
    assert outcome.status == 1
    assert re.search(r"WorkerError: \S+ died on rank 0 \(", outcome.errors), outcome.errors
    assert "the run could not start again: ranks_per_node=[1] needs 1 ranks on 1 nodes" in outcome.errors
    assert [row[keys.STEP] for row in outcome.rows][:2] == [0, 1]


def test_a_base_model_is_warmed_up_again_after_a_fault(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters' rank, which starts afterwards, does not take the only CPU of the rank that warms it up."""
    warm_up, attempts = _Run._warm_up, []

    def fails_once(run: _Run, *arguments: Any) -> None:
        attempts.append(run)
        if len(attempts) == 1:
            raise WorkerError("rank 0 has ended")
        warm_up(run, *arguments)

    monkeypatch.setattr(_Run, "_warm_up", fails_once)
    others = placement_group([{"CPU": ray.available_resources()["CPU"] - 1}])
    try:
        ray.get(others.ready(), timeout=LIMIT_S)
        outcome = runs("adapters", [], *ONE_RANK, "actor.lora.rank=8", "run.steps=1", "run.eval_every=0")
    finally:
        remove_placement_group(others)
    assert outcome.status == 0, outcome.errors
    assert len(attempts) == 2 and "starting the ranks again (1 of" in outcome.console


@contextlib.contextmanager
def killed_at_the_end(command: list[str], variables: dict[str, str]) -> Iterator[None]:
    """Run a command, and kill it and everything that it has started when the context closes.

    They are children of the warm process, which others have children of.
    """
    warm = psutil.Process(int(variables["WARM_WORKERS_PROCESS"]))
    before = set(warm.children(recursive=True))
    nothing = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=nothing, stderr=nothing, cwd=ROOT, env=os.environ | variables):
        try:
            yield
        finally:
            processes = set(warm.children(recursive=True)) - before
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=LIMIT_S)


def test_who_asks_to_stop_while_the_model_is_saved_has_it_and_may_go_on_with_other_batches(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run is longer and has smaller batches: its prompts follow those that were already drawn."""
    too_late = StopRequest.too_late

    @contextlib.contextmanager
    def signalled(stop: StopRequest) -> Iterator[None]:
        with too_late(stop):
            os.kill(os.getpid(), signal.SIGTERM)
            yield

    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "too_late", signalled)
        outcome = runs("late", (), *ONE_RANK, "run.steps=2")
    assert outcome.status == 0
    assert "SIGTERM: the run ends once its trained model is saved; a second" in outcome.errors
    assert "trained model saved" in outcome.console and "resumes it" not in outcome.console
    before = outcome.weights
    again = runs("late", (), *ONE_RANK, "run.steps=4", "data.batch_size=4", "resume=auto")
    assert again.status == 0, again.errors
    assert again.weights != before
    newest, older = checkpoints_in(again.folder)
    assert [one.run_state().data.prompts_drawn for one in (older, newest)] == [2 * 8, 2 * 8 + 2 * 4]


def test_ctrl_c_twice_ends_at_once(runs: Runs) -> None:
    outcome = runs("interrupted", ["1-interrupt-twice"], *ONE_RANK)
    assert outcome.status == 130
    assert "Ctrl-C again ends it at once" in outcome.errors
    assert "interrupted; what has been written so far is kept" in outcome.errors
    assert [row[keys.STEP] for row in outcome.rows] == [0]


def test_drift_between_engine_and_trainer_stops_the_run_and_keeps_what_shows_it(runs: Runs) -> None:
    outcome = runs("drifting", ["2-damaged-switch"])
    assert outcome.status == 1
    failed = re.search(
        r"actor\.compute_log_probs failed on rank (\d) .*: DriftError: log-probs of engine and trainer are",
        outcome.errors,
    )
    assert failed
    assert "starting the ranks again" not in outcome.console
    # The other tensor shard finds the same, and has kept its digests too unless the run has ended it before.
    file = outcome.folder / "drift" / f"rank-{int(failed[1]):05d}.safetensors"
    rows: dict[str, Any] = load_file(file)
    assert rows["tokens"].shape == (16, 32 + 12)
    difference = (rows["log_probs"] - rows["rollout_log_probs"]).abs()
    assert difference.sum() / rows["response_lengths"].sum() > 0.5
    told = yaml.safe_load(file.with_suffix(".json").read_text())
    assert (told["parallel"], told["generate"]) == ("1-2-1", "1-1")
    assert len(told["plan"]) == 64
    assert told["weights"]
