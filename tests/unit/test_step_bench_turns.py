"""The child process that takes turns, with tiny programs, and the creation of its environment, without a network."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from packaging.version import Version

from hybridengine.bench.step import trl_side
from hybridengine.bench.step.trl_side import STAMP, Ask, child_process, make_environment, requirements
from hybridengine.errors import ConfigError, WorkerError, WorkerTimeoutError

CHANNEL = """
import os, sys, time
from multiprocessing.connection import Connection
channel = Connection(int(sys.argv[1]))
"""
DOUBLER = """
while True:
    channel.send({"twice": 2 * channel.recv(), "pid": os.getpid()})
"""


@pytest.fixture
def child(tmp_path: Path):
    @contextmanager
    def start(program: str) -> Iterator[Ask]:
        with child_process([sys.executable, "-Sc", CHANNEL + program], tmp_path / "log") as ask:
            yield ask

    return start


def test_each_question_gets_its_answer(child):
    with child(DOUBLER) as ask:
        assert [ask(number, 20)["twice"] for number in (1, 2, 30)] == [2, 4, 60]


def test_a_waiting_child_takes_no_time_of_the_cores(child):
    with child(DOUBLER) as ask:
        pid = ask(1, 20)["pid"]

        def ticks() -> int:
            return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

        before = ticks()
        time.sleep(0.5)
        assert ticks() - before <= 1


def test_silence_has_a_limit(child):
    with child("time.sleep(600)") as ask:
        begin = time.monotonic()
        with pytest.raises(
            WorkerTimeoutError, match=r"TRL has not answered within 1 s; allow more with --timeout"
        ):
            ask(1, 1)
        assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("sys.exit('no module named trl')", r"(?s)TRL has ended.*no module named trl"),
        ("channel.recv(); sys.exit('killed')", r"(?s)TRL has ended.*killed"),
        ('channel.recv(); channel.send({"error": "ValueError: 3"})', r"TRL: ValueError: 3"),
    ],
)
def test_a_child_that_fails_says_why(child, program: str, message: str):
    with child(program) as ask, pytest.raises(WorkerError, match=message):
        ask(1, 20)


def test_the_child_and_what_it_has_started_end_with_the_context(child):
    program = (
        "import subprocess\n"
        "own = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "channel.recv(); channel.send({'pid': own.pid}); channel.recv()"
    )
    with child(program) as ask:
        pid = ask(1, 20)["pid"]
        assert _lives(pid)
    deadline = time.monotonic() + 60
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Installer:
    """Replaces venv and pip: creates the Python, and records its arguments."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.fails = False

    def __call__(self, command: Sequence[str]) -> None:
        self.commands.append(list(command))
        if self.fails and "pip" in command:
            raise ConfigError("pip failed")
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch) -> Installer:
    installer = Installer()
    monkeypatch.setattr(trl_side, "install", installer)
    return installer


def test_an_environment_is_made_once(tmp_path: Path, installer: Installer):
    said: list[str] = []
    python = make_environment(tmp_path / "cache", said.append)
    assert python.exists()
    assert installer.commands[0] == [sys.executable, "-m", "venv", str(python.parent.parent)]
    assert installer.commands[1][:4] == [str(python), "-m", "pip", "install"]
    assert set(requirements()) <= set(installer.commands[1])
    assert len(said) == 1
    assert make_environment(tmp_path / "cache", said.append) == python
    assert (len(installer.commands), len(said)) == (2, 1)


def test_an_environment_that_is_not_whole_is_made_again(tmp_path: Path, installer: Installer):
    installer.fails = True
    with pytest.raises(ConfigError, match="pip failed"):
        make_environment(tmp_path, lambda text: None)
    (python,) = tmp_path.glob("*/bin/python")
    (python.parent / "left").touch()
    assert not list(tmp_path.glob(f"*/{STAMP}"))
    installer.fails = False
    assert make_environment(tmp_path, lambda text: None) == python
    assert len(installer.commands) == 4
    assert not (python.parent / "left").exists()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--environment .*file/cache cannot be written to"):
        make_environment(tmp_path / "file" / "cache", lambda text: None)


def test_torch_is_this_environments_own():
    import torch

    name, _, number = requirements()[0].partition("==")
    # The last part of a CUDA build's version is only in torch itself.
    assert (name, Version(number).public) == ("torch", Version(torch.__version__).public)
    assert all("==" in one for one in requirements())


def test_a_command_that_fails_is_shown_with_its_last_lines():
    with pytest.raises(
        ConfigError, match=r"(?s)cannot be made.*no package of this name.*PIP_EXTRA_INDEX_URL"
    ):
        trl_side.install([sys.executable, "-Sc", "import sys; sys.exit('no package of this name')"])
