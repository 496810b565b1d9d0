"""Limits on file systems that do not answer; a call that waits for an event stands for one that the kernel blocks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridengine.checkpoints.run_lock import LOCK_FILE
from hybridengine.files import within
from hybridengine.training import folder_watch
from hybridengine.training.folder_watch import watched_folder


def test_what_takes_longer_than_its_limit_is_left_behind() -> None:
    assert within(10, lambda a, b: a - b, 5, 3) == 2
    with pytest.raises(KeyError, match="none"):
        within(10, {}.__getitem__, "none")
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        within(0.2, threading.Event().wait, 60)
    assert time.monotonic() - begin < 30


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return the event without which a folder does not answer."""
    event = threading.Event()
    monkeypatch.setattr(folder_watch, "PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(folder_watch, "_touch", lambda folder: event.wait())
    return event


def test_a_folder_that_answers_late_is_reported(tmp_path: Path, answers: threading.Event) -> None:
    said = list[str]()
    with watched_folder(tmp_path, 60, said.append) as _, pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_watch, "WARN_S", 0.1)
        answers.clear()
        eventually(lambda: len(said) == 1)
        answers.set()
        eventually(lambda: len(said) == 2)
    assert said[0].startswith(f"warning: {tmp_path} on host ")
    assert said[0].endswith(" has not answered for 0.1 s; the run waits for it, up to 60 s (timeouts.save_s)")
    assert said[1].startswith(f"{tmp_path} answers again, after ")


def test_a_folder_that_never_answers_ends_the_process(
    tmp_path: Path,
    answers: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    statuses = list[int]()
    monkeypatch.setattr(os, "_exit", statuses.append)
    with watched_folder(tmp_path, 0.4, lambda text: None):
        eventually(lambda: bool(statuses))
    answers.set()
    assert statuses[0] == 1
    assert " has not answered for 0.4 s (timeouts.save_s); check its file system" in capsys.readouterr().err


def test_the_lock_of_a_run_is_touched_and_a_folder_that_is_not_there_yet_is_no_fault(tmp_path: Path) -> None:
    folder_watch._touch(tmp_path / "runs" / "one")
    lock = tmp_path / LOCK_FILE
    lock.touch()
    os.utime(lock, (1, 1))
    folder_watch._touch(tmp_path)
    assert time.time() - lock.stat().st_mtime < 60


def eventually(holds: Callable[[], bool], limit_s: float = 30) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"it does not hold within {limit_s:g} s"
        time.sleep(0.01)
