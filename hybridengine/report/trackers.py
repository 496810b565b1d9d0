"""Logging of metrics to Weights & Biases and MLflow, each in its own thread.

Accounts, servers and projects are configured by the packages' own settings (WANDB_MODE, WANDB_PROJECT,
MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...). A tracker cannot slow or end a run once it has begun. Each package is
imported when its tracker is opened.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from hybridengine.errors import ConfigError, raise_all
from hybridengine.redaction import HIDDEN, is_secret, without_secrets
from hybridengine.report.keys import STEP
from hybridengine.report.step_rows import Row

PROJECT = "hybridengine"
LOGIN_TIMEOUT_S = 60.0
"""Time limit for entering wandb's API key."""
FINISH_TIMEOUT_S = 50.0

MLFLOW_FILE = "mlflow.db"
MLFLOW_MAX_VALUE = 500
"""Largest number of characters of a parameter's value that every server accepts."""
OPEN_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 60.0
"""Time limit for sending the remaining rows at the end of a run."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for its trackers."""

    name: str
    folder: Path
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Destination of metrics; used by one thread, and may raise any exception."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class WandbTracker:
    """Weights & Biases run, with the keys and steps of metrics.jsonl."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        # The live view owns the terminal: wandb must not record or replace output.
        settings: dict[str, Any] = {"console": "off", "login_timeout": LOGIN_TIMEOUT_S}
        if "finish_timeout" in getattr(wandb.Settings, "model_fields", ()):  # newer versions
            settings["finish_timeout"] = FINISH_TIMEOUT_S
        with _arguments_without_secrets():
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.name,
                dir=str(run.folder),
                config=dict(run.config),
                settings=wandb.Settings(**settings),
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row; wandb drops a step that is not larger than the last one, with a warning."""
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


@contextlib.contextmanager
def _arguments_without_secrets() -> Iterator[None]:
    """Hide secrets in overrides from wandb, which records the command line."""
    typed = sys.argv
    sys.argv = [_without_secret(argument) for argument in typed]
    try:
        yield
    finally:
        sys.argv = typed


def _without_secret(argument: str) -> str:
    key, is_override, _ = argument.partition("=")
    return f"{key}={HIDDEN}" if is_override and is_secret(key) else without_secrets(argument)


class MlflowTracker:
    """MLflow run, on the server of MLFLOW_TRACKING_URI or in a file next to the runs' folders."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow = mlflow
        file = f"sqlite:///{(run.folder.parent / MLFLOW_FILE).absolute()}"
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or file)
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        mlflow.start_run(run_name=run.name)  # the active run of this thread
        mlflow.log_params({key: value[:MLFLOW_MAX_VALUE] for key, value in flat_config(run.config)})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({mlflow_name(key): float(value) for key, value in values.items()}, step=step)

    def close(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


def mlflow_name(key: str) -> str:
    """Return the key in the characters that MLflow accepts: "a.b->c.d" becomes "a.b to c.d"."""
    return re.sub(r"[^\w./: -]", "_", key.replace("->", " to "), flags=re.ASCII)


def flat_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of every field; values other than strings are JSON."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_config(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)


OPENERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}
"""Function that opens the tracker of each package."""


def missing_trackers(names: Sequence[str]) -> list[str]:
    """Return one problem per tracker whose package is not installed."""
    return [
        f"run.trackers names {name}, and there is no package {name}; install hybridengine[{name}], or leave {name} out"
        for name in dict.fromkeys(names)
        if not _is_installed(name)
    ]


class Trackers:
    """Trackers of one run; a context manager that opens and closes them."""

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        self._threads = [_TrackerThread(name, partial(OPENERS[name], run)) for name in dict.fromkeys(names)]

    def log(self, row: Row) -> None:
        """Queue a row of metrics.jsonl, without values that were not finite; does not block."""
        step = row[STEP]
        assert isinstance(step, int), "every row has a step"
        values = {key: value for key, value in row.items() if key != STEP and value is not None}
        for thread in self._threads:
            thread.do(f"the row of step {step}", lambda tracker: tracker.log(step, values))

    def __enter__(self) -> Trackers:
        """Open all trackers; raise ConfigError for those that lack an account, a server or a writable folder."""
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        for thread in self._threads:
            thread.start()
        problems = [problem for thread in self._threads if (problem := thread.open_problem(deadline))]
        if problems:
            self._close(failed=True)
        raise_all(problems, ConfigError)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._close(failed=kind is not None)

    def _close(self, failed: bool) -> None:
        for thread in self._threads:
            thread.do("the end of the run", lambda tracker: tracker.close(failed))
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.end(deadline)


class _TrackerThread(threading.Thread):
    """Thread that runs a tracker's jobs in order and warns of the first failure; a daemon, as a connection may hang."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        super().__init__(name=name, daemon=True)
        self._open = open_tracker
        self._jobs = queue.SimpleQueue[tuple[str, Callable[[Tracker], None]] | None]()
        self._opening = Future[Tracker]()
        self._has_warned = False

    def open_problem(self, deadline: float) -> str | None:
        """Return the reason why the tracker is not open by the deadline; None if it is open."""
        remedy = f"see {self.name}'s own settings, or leave it out of run.trackers"
        wait([self._opening], max(0.0, deadline - time.monotonic()))
        if not self._opening.done():
            return f"run.trackers: {self.name} did not open within {OPEN_TIMEOUT_S:g} s; {remedy}"
        if error := self._opening.exception():
            return f"run.trackers: {self.name} cannot be opened ({_first_line(error)}); {remedy}"
        return None

    def do(self, what: str, job: Callable[[Tracker], None]) -> None:
        self._jobs.put((what, job))

    def end(self, deadline: float) -> None:
        """Wait until all jobs are done or the deadline passes; a tracker that never opened is not waited for."""
        self._jobs.put(None)
        if not self._opening.done():
            return
        self.join(max(0.0, deadline - time.monotonic()))
        if self.is_alive():
            self._warn(f"was not done {CLOSE_TIMEOUT_S:g} s after the run's end")

    def run(self) -> None:
        # Failures of the package do not end the run, whose rows are in metrics.jsonl.
        try:
            tracker = self._open()
        except BaseException as error:
            self._opening.set_exception(error)
            return
        self._opening.set_result(tracker)
        while (job := self._jobs.get()) is not None:
            what, act = job
            try:
                act(tracker)
            except Exception as error:
                self._warn(f"did not take {what} ({_first_line(error)})")

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("%s %s; rows that it lacks are in metrics.jsonl", self.name, problem)


def _is_installed(name: str) -> bool:
    """Return True if the package is installed; a mere folder of that name, as wandb creates, does not count."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _first_line(error: BaseException) -> str:
    text = without_secrets(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:297] + '...'}"
