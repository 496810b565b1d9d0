"""Where metrics go besides the run's folder: Weights & Biases and MLflow, each in a thread of its own.

Accounts, servers and projects are those packages' own settings (WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME, ...). Nothing of theirs can slow or end a run once it has begun.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from types import TracebackType

from hybridengine.errors import ConfigError, raise_all
from hybridengine.metrics.keys import STEP
from hybridengine.metrics.rows import Row
from hybridengine.metrics.tracker_packages import OPENERS, TrackedRun, Tracker
from hybridengine.redaction import without_secrets

OPEN_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 60.0
"""Longest that the end of a run waits for rows that are still on their way."""

_logger = logging.getLogger(__name__)


def missing_trackers(names: Sequence[str]) -> list[str]:
    """What to say of trackers whose package is not installed; empty where all are."""
    return [
        f"run.trackers names {name}, and there is no package {name}; install hybridengine[{name}], or leave {name} out"
        for name in dict.fromkeys(names)
        if not _is_installed(name)
    ]


class Trackers:
    """The trackers of one run; a context manager, which opens them and closes them."""

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        self._threads = [_TrackerThread(name, partial(OPENERS[name], run)) for name in dict.fromkeys(names)]

    def log(self, row: Row) -> None:
        """Hand on a row as it was written to metrics.jsonl, without values that were not finite; waits for nothing."""
        step = row[STEP]
        assert isinstance(step, int), "every row has a step"
        values = {key: value for key, value in row.items() if key != STEP and value is not None}
        for thread in self._threads:
            thread.do(f"the row of step {step}", lambda tracker: tracker.log(step, values))

    def __enter__(self) -> Trackers:
        """Open all.

        Raises:
            ConfigError: some cannot be opened, because an account, a server or a place to write to is missing.
        """
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        for thread in self._threads:
            thread.start()
        problems = [problem for thread in self._threads if (problem := thread.open_problem(deadline))]
        if problems:
            self._close(failed=True)
        raise_all(problems, ConfigError)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=kind is not None)

    def _close(self, failed: bool) -> None:
        for thread in self._threads:
            thread.do("the end of the run", lambda tracker: tracker.close(failed))
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.end(deadline)


class _TrackerThread:
    """Does everything with one tracker, one thing after the other; warns of the first failure only.

    A daemon: a connection that hangs does not keep the process alive.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self._name, self._open = name, open_tracker
        self._jobs = queue.SimpleQueue[tuple[str, Callable[[Tracker], None]] | None]()
        self._opened, self._is_open = threading.Event(), False
        self._open_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._has_warned = False

    def start(self) -> None:
        self._thread.start()

    def open_problem(self, deadline: float) -> str | None:
        """Why the tracker is not open when it should be; None where it is."""
        remedy = f"see {self._name}'s own settings, or leave it out of run.trackers"
        if not self._opened.wait(max(0.0, deadline - time.monotonic())):
            return f"run.trackers: {self._name} did not open within {OPEN_TIMEOUT_S:g} s; {remedy}"
        if not self._is_open:
            return f"run.trackers: {self._name} cannot be opened ({_first_line(self._open_error)}); {remedy}"
        return None

    def do(self, what: str, job: Callable[[Tracker], None]) -> None:
        self._jobs.put((what, job))

    def end(self, deadline: float) -> None:
        """Wait until everything is done, not for long; a tracker that has not opened has nothing to do."""
        self._jobs.put(None)
        if not self._opened.is_set():
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and self._is_open:
            self._warn(f"was not done {CLOSE_TIMEOUT_S:g} s after the run's end")

    def _run(self) -> None:
        # Whatever the package does, the run goes on: it has its rows in metrics.jsonl.
        try:
            tracker = self._open()
            self._is_open = True
        except BaseException as error:
            self._open_error = error
            return
        finally:
            self._opened.set()
        while (job := self._jobs.get()) is not None:
            what, act = job
            try:
                act(tracker)
            except Exception as error:
                self._warn(f"did not take {what} ({_first_line(error)})")

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("%s %s; rows that it lacks are in metrics.jsonl", self._name, problem)


def _is_installed(name: str) -> bool:
    """Whether there is such a package; a folder of that name, which wandb leaves behind, is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _first_line(error: BaseException | None) -> str:
    text = without_secrets(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:297] + '...'}"
