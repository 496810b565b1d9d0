"""A launch whose folder hangs, or fails for a while."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridengine.checkpoints.run_lock import is_locked, run_lock
from hybridengine.errors import OutputError
from hybridengine.launch import meeting as meeting_module
from hybridengine.launch import node, ray_node
from hybridengine.launch.meeting import END, STOP, Meeting
from hybridengine.launch.node import NODE_LOST, Lead, run_node
from hybridengine.launch.stopping import Stopping
from tests.unit.test_launch_node import task_of

LIMIT_S = 0.3


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A file system whose folders and new files are not there before the event is set."""
    answers = threading.Event()
    for module, name in ((os, "listdir"), (meeting_module.tempfile, "mkstemp")):
        call = getattr(module, name)

        def late(*arguments: Any, call: Any = call, **settings: Any) -> Any:
            answers.wait(60)
            return call(*arguments, **settings)

        monkeypatch.setattr(module, name, late)
    monkeypatch.setattr(meeting_module, "ANSWER_LIMIT_S", LIMIT_S)
    yield answers
    answers.set()


def test_a_folder_that_hangs_is_named_within_the_limit(
    tmp_path: Path, hangs: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    reason = rf"{tmp_path}.* cannot be %s \(no answer within {LIMIT_S} s\)"
    meeting = Meeting(tmp_path, print)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *_, **__: hangs.wait(60))
        with pytest.raises(OutputError, match=reason % "written"):
            Meeting(tmp_path, print)
    with pytest.raises(OutputError, match=reason % "read"):
        meeting.read(END)
    with pytest.raises(OutputError, match=reason % "written"):
        meeting.write(END, status=0)
    begin = time.monotonic()
    meeting.close()
    assert time.monotonic() - begin < 30
    hangs.set()
    monkeypatch.setattr(meeting_module, "ANSWER_LIMIT_S", 30.0)
    meeting.write(END, status=0)
    assert meeting.read(END) == {"status": 0}


def test_a_file_that_is_not_whole_is_named(tmp_path: Path):
    (tmp_path / END).write_text("")
    with pytest.raises(OutputError, match=rf"{tmp_path / END} cannot be read \(Expecting value"):
        Meeting(tmp_path, print).read(END)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("answer", ["fails", "hangs"])
def test_a_run_goes_on_while_its_folder_fails(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: threading.Event
):
    """The first node takes signals and the end of its run; it takes the launcher's file when the folder is back."""
    broken, exists = threading.Event(), Path.exists

    def looked_for(path: Path) -> bool:
        if path.name == STOP and not hangs.is_set():
            broken.set()
            if answer == "fails":
                raise OSError(5, "Input/output error")
            hangs.wait(60)
        return exists(path)

    class NoRay:
        address = "127.0.0.1:1"

        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> NoRay:
            return self

        def __exit__(self, *_: object) -> None: ...
        def wait(self, *_: object) -> None: ...
        def check(self) -> None: ...

    command = f"""
import signal, time
signal.signal(15, lambda *_: exit(7))
open({str(tmp_path / "ready")!r}, "w").close()
time.sleep(60)
"""
    monkeypatch.setattr(Path, "exists", looked_for)
    monkeypatch.setattr(node, "RayNode", NoRay)
    monkeypatch.setattr(Lead, "_wait_for_nodes", lambda *_: None)
    monkeypatch.setattr(Lead, "_lost", lambda *_: ["b"])  # of a run that was asked to stop it does not matter
    real = node.fated
    monkeypatch.setattr(node, "fated", lambda c, **settings: real([c[0], "-c", command], **settings))
    for name in ("read", "write_token"):
        monkeypatch.setattr(Meeting, name, lambda self, *_: None)
    monkeypatch.setattr(node, "token_environment", lambda *_: dict(os.environ))
    monkeypatch.setattr(Meeting, "write", lambda *_, **__: None)
    monkeypatch.setattr(node, "is_locked", lambda _: False)
    (tmp_path / STOP).touch()

    def mend_folder() -> None:
        broken.wait(30)
        while not os.path.exists(tmp_path / "ready"):
            time.sleep(0.05)
        time.sleep(1.0)
        hangs.set()

    threading.Thread(target=mend_folder, daemon=True).start()
    said = list[str]()
    assert run_node(task_of(tmp_path, 0, "a"), said.append) == 7
    assert said == ["SIGTERM is passed on to the run, which saves its step"]


@pytest.mark.usefixtures("signals")
def test_a_lost_node_that_cannot_be_written_down_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The launcher starts again all the same."""

    def fails(_: Meeting, nodes: list[str]) -> None:
        raise OutputError(f"no room for {nodes}")

    monkeypatch.setattr(ray_node, "fated", lambda command, **settings: subprocess.Popen("false", **settings))
    monkeypatch.setattr(Meeting, "write_lost", fails)
    said = list[str]()
    assert run_node(task_of(tmp_path, 0, "a"), said.append) == NODE_LOST
    assert said[-1] == "no room for ['a']"
    assert (Meeting(tmp_path, print).read(END) or {})["status"] == NODE_LOST


@pytest.mark.usefixtures("signals")
def test_any_error_of_a_node_reaches_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def raises(*_: object) -> None:
        raise KeyError("eth0:1")

    monkeypatch.setattr(node, "_follow", raises)
    with pytest.raises(KeyError):
        run_node(task_of(tmp_path, 1, "a", "b"), print)
    failed = Meeting(tmp_path, print).read("failed-1.json")
    assert failed == {"host": "b", "reason": "KeyError: 'eth0:1'", "lacks_ray": False, "refused": False}


def test_a_held_run_folder_is_seen_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Linux's client of NFSv4 grants an exclusive lock only of a file that is open for writing."""
    lock = fcntl.flock

    def as_on_nfs(file: Any, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    with run_lock(tmp_path, print):
        assert is_locked(tmp_path / "run.lock")
    assert not is_locked(tmp_path / "run.lock")


@pytest.mark.usefixtures("signals")
def test_a_launch_that_has_ended_no_longer_looks_for_its_file(tmp_path: Path):
    stopping = Stopping(leads=True, attached=False, say=print)
    lead = Lead(task_of(tmp_path, 0, "a"), Meeting(tmp_path, print), stopping, print)
    (tmp_path / STOP).touch()
    lead._ended.set()
    lead._listen()
    assert not stopping.asked
