"""Rows in wandb and mlflow: the same as in metrics.jsonl; no failure of a tracker disturbs the run."""

from __future__ import annotations

import logging
import sys
import threading
import time
import tomllib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from hybridengine.errors import ConfigError
from hybridengine.report import trackers as trackers_module
from hybridengine.report.recorder import MetricsRecorder
from hybridengine.report.trackers import (
    OPENERS,
    TrackedRun,
    Trackers,
    flat_config,
    missing_trackers,
    mlflow_name,
)
from tests.unit.tracker_packages import MlflowServer, Wandb

CONFIG = {
    "run": {"name": "demo", "steps": 3, "trackers": ["wandb"]},
    "cluster": {"pools": {}, "address": None},
    "actor": {"parallel": "2-2-1", "optimizer": {"lr": 1e-5}},
    "long": "x" * 9000,
}
ROWS = [
    (0, {"eval/exact_match": 0.25}),
    (1, {"reward/mean": 0.5, "kl/mean": float("nan"), "switch/received_bytes": 2**40 + 1}),
    (2, {"reward/mean": 0.75, "transfer/actor.generate_sequences->reward.compute_scores_bytes": 4096}),
]


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    (tmp_path / "demo").mkdir()
    return TrackedRun("demo", tmp_path / "demo", CONFIG)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    server = MlflowServer()
    monkeypatch.setitem(sys.modules, "mlflow", server.module())
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return server


def _log_all(names: list[str], run: TrackedRun) -> None:
    with closing(MetricsRecorder(run.folder)) as recorder, Trackers(names, run) as trackers:
        for step, metrics in ROWS:
            trackers.log(recorder.record(step, metrics))


def test_wandb_gets_every_row_with_its_keys_and_step_and_the_configuration(
    run: TrackedRun, wandb: Wandb
) -> None:
    _log_all(["wandb", "wandb"], run)
    (logged,) = wandb.runs
    assert logged.history == [
        (0, {"eval/exact_match": 0.25}),
        (1, {"reward/mean": 0.5, "switch/received_bytes": 2**40 + 1}),
        (2, {"reward/mean": 0.75, "transfer/actor.generate_sequences->reward.compute_scores_bytes": 4096}),
    ]
    arguments = logged.arguments
    assert (arguments["project"], arguments["name"], arguments["dir"]) == (
        "hybridengine",
        "demo",
        str(run.folder),
    )
    assert arguments["config"] == CONFIG
    assert arguments["console"] == "off", "what is printed belongs to the terminal"
    assert 0 < arguments["finish_timeout"] < trackers_module.CLOSE_TIMEOUT_S
    assert logged.exit_code == 0


def test_mlflow_gets_every_row_and_the_configuration_as_parameters(
    run: TrackedRun, mlflow: MlflowServer
) -> None:
    _log_all(["mlflow"], run)
    (logged,) = mlflow.runs
    assert mlflow.uri == f"sqlite:///{run.folder.parent}/mlflow.db"
    assert (logged.name, logged.experiment, logged.status) == ("demo", "hybridengine", "FINISHED")
    assert logged.metrics == [
        (0, "eval/exact_match", 0.25),
        (1, "reward/mean", 0.5),
        (1, "switch/received_bytes", float(2**40 + 1)),
        (2, "reward/mean", 0.75),
        (2, "transfer/actor.generate_sequences to reward.compute_scores_bytes", 4096.0),
    ]
    assert logged.params == {
        "run.name": "demo",
        "run.steps": "3",
        "run.trackers": '["wandb"]',
        "cluster.pools": "{}",
        "cluster.address": "null",
        "actor.parallel": "2-2-1",
        "actor.optimizer.lr": "1e-05",
        "long": "x" * 500,
    }


def test_mlflow_takes_its_server_and_experiment_from_the_environment(
    run: TrackedRun, mlflow: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    mlflow.experiments += ["other", "mine"]
    many = TrackedRun("demo", run.folder, {f"key{number}": number for number in range(250)})
    with Trackers(["mlflow"], many):
        pass
    assert (mlflow.uri, mlflow.experiments) == ("http://server:5000", ["other", "mine"])
    assert mlflow.runs[0].experiment == "mine"
    assert len(mlflow.runs[0].params) == 250


def test_wandb_keeps_a_command_line_without_secrets(
    run: TrackedRun, wandb: Wandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "k-0123456")
    typed = [
        "hybridengine",
        "train",
        "a.yaml",
        "run.steps=3",
        "reward.terms.judge.options.api_key=abc",
        "k-0123456",
    ]
    monkeypatch.setattr(sys, "argv", typed)
    _log_all(["wandb"], run)
    assert wandb.runs[0].command_line == [
        *typed[1:4],
        "reward.terms.judge.options.api_key=(hidden)",
        "(hidden: JUDGE_API_KEY)",
    ]
    assert sys.argv is typed


def test_a_run_that_failed_is_marked_so(run: TrackedRun, wandb: Wandb, mlflow: MlflowServer) -> None:
    with pytest.raises(KeyboardInterrupt), Trackers(["wandb", "mlflow"], run):
        raise KeyboardInterrupt
    assert (wandb.runs[0].exit_code, mlflow.runs[0].status) == (1, "FAILED")


@pytest.mark.parametrize(
    ("key", "name"), [("a/b.c_s", "a/b.c_s"), ("a.b->c.d", "a.b to c.d"), ("é<x>", "__x_")]
)
def test_keys_as_mlflow_takes_them(key: str, name: str) -> None:
    assert mlflow_name(key) == name


def test_an_empty_section_is_a_value() -> None:
    assert dict(flat_config({"a": {"b": {}, "c": [1, 2]}, "d": True})) == {
        "a.b": "{}",
        "a.c": "[1, 2]",
        "d": "true",
    }


def test_a_missing_package_is_named_with_the_remedy_and_a_folder_of_its_name_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # wandb itself leaves such a folder behind
    monkeypatch.setattr(
        sys, "path", [str(tmp_path), *(place for place in sys.path if "site-packages" not in place)]
    )
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert missing_trackers(["wandb", "mlflow", "wandb"]) == [
        f"run.trackers names {name}, and there is no package {name}; install hybridengine[{name}], or leave {name} out"
        for name in ("wandb", "mlflow")
    ]
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").touch()
    assert [problem.split()[2] for problem in missing_trackers(["wandb", "mlflow"])] == ["wandb,"]
    assert missing_trackers([]) == []


def test_the_remedy_names_extras_that_there_are() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert set(OPENERS) <= set(project["project"]["optional-dependencies"])


def test_what_cannot_be_opened_is_one_error_before_the_run(
    run: TrackedRun, mlflow: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "wandb", Wandb(RuntimeError("No API key configured.\n  Use `wandb login`"))
    )
    with pytest.raises(ConfigError) as caught, Trackers(["wandb", "mlflow"], run):
        pytest.fail("the run must not begin")
    assert str(caught.value) == (
        "run.trackers: wandb cannot be opened (RuntimeError: No API key configured. Use `wandb login`);"
        " see wandb's own settings, or leave it out of run.trackers"
    )
    assert mlflow.runs[0].status == "FAILED", "the other one is not left open"


class _Stub:
    """A tracker that treats each row as a test specifies."""

    def __init__(self, act: Mapping[int, BaseException | threading.Event]) -> None:
        self.act, self.taken, self.closed = act, list[int](), threading.Event()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        what = self.act.get(step)
        if isinstance(what, BaseException):
            raise what
        if what is not None:
            what.wait(30)
        self.taken.append(step)

    def close(self, failed: bool) -> None:
        self.closed.set()


def _stubbed(monkeypatch: pytest.MonkeyPatch, stub: _Stub) -> None:
    monkeypatch.setattr(trackers_module, "OPENERS", {"wandb": lambda run: stub})


def test_a_tracker_that_fails_in_the_middle_is_warned_of_once_and_gets_the_rows_after(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub = _Stub({2: ConnectionError("no route to host"), 3: ConnectionError("again")})
    _stubbed(monkeypatch, stub)
    with caplog.at_level(logging.WARNING), Trackers(["wandb"], run) as trackers:
        for step in range(5):
            trackers.log({"step": step, "x": 1.0})
    assert stub.taken == [0, 1, 4]
    assert stub.closed.is_set()
    assert [record.getMessage() for record in caplog.records] == [
        "wandb did not take the row of step 2 (ConnectionError: no route to host); rows that it lacks are in"
        " metrics.jsonl"
    ]


def test_a_connection_that_hangs_holds_up_neither_a_step_nor_for_long_the_end(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()
    _stubbed(monkeypatch, _Stub({1: never}))
    monkeypatch.setattr(trackers_module, "CLOSE_TIMEOUT_S", 0.3)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), Trackers(["wandb"], run) as trackers:
        for step in range(3):
            trackers.log({"step": step, "x": 1.0})
        assert time.monotonic() - began < 60
    assert time.monotonic() - began < 60
    (warning,) = caplog.records
    assert (
        warning.getMessage()
        == "wandb was not done 0.3 s after the run's end; rows that it lacks are in metrics.jsonl"
    )
    never.set()


def test_a_tracker_that_does_not_open_in_time_is_an_error(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(trackers_module, "OPENERS", {"mlflow": lambda run: never.wait(3600)})
    monkeypatch.setattr(trackers_module, "OPEN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(trackers_module, "CLOSE_TIMEOUT_S", 3600.0)  # not awaited if it has not begun
    with pytest.raises(
        ConfigError, match=r"run\.trackers: mlflow did not open within 0\.2 s; see mlflow's own settings"
    ):
        Trackers(["mlflow"], run).__enter__()
    never.set()


def test_without_trackers_there_are_no_threads(run: TrackedRun) -> None:
    before = threading.active_count()
    with Trackers([], run) as trackers:
        trackers.log({"step": 1})
        assert threading.active_count() == before
