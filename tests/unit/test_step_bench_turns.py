"""The child that takes turns, against tiny programs, and the environment that is made for it, without a network."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from packaging.version import Version

from hybridengine.bench.step_environment import STAMP, make_environment, requirements
from hybridengine.bench.step_turns import TurnTaker
from hybridengine.errors import ConfigError, WorkerError, WorkerTimeoutError

DOUBLER = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps({"twice": 2 * json.loads(line)["step"]}), flush=True)
"""


@pytest.fixture
def child(tmp_path: Path):
    @contextmanager
    def start(program: str) -> Iterator[TurnTaker]:
        with TurnTaker("TRL", [sys.executable, "-c", program], tmp_path / "log") as taker:
            yield taker

    return start


def test_each_question_gets_its_answer(child):
    with child(DOUBLER) as taker:
        assert taker.receive(20) == {"ready": True}
        assert [taker.ask({"step": step}, 20)["twice"] for step in (1, 2, 30)] == [2, 4, 60]


def test_a_waiting_child_takes_no_time_of_the_cores(child):
    with child("import os\n" + DOUBLER.replace('{"ready": True}', '{"pid": os.getpid()}')) as taker:
        pid = taker.receive(20)["pid"]

        def ticks() -> int:
            return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

        before = ticks()
        time.sleep(0.5)
        assert ticks() - before <= 1


def test_answers_that_come_in_pieces_or_together(child):
    program = (
        "import sys, time\n"
        "sys.stdout.write('{\"a\":'); sys.stdout.flush(); time.sleep(0.3)\n"
        "sys.stdout.write(' 1}\\n{\"b\": 2}\\n'); sys.stdout.flush(); sys.stdin.read()"
    )
    with child(program) as taker:
        assert [taker.receive(20), taker.receive(20)] == [{"a": 1}, {"b": 2}]


def test_silence_has_a_limit(child):
    with child("import sys; print('still loading', file=sys.stderr, flush=True); sys.stdin.read()") as taker:
        begin = time.monotonic()
        with pytest.raises(
            WorkerTimeoutError, match=r"TRL has not answered within 1 s; allow more with --timeout"
        ):
            taker.receive(1)
        assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no module named trl')", r"(?s)TRL has ended.*no module named trl"),
        ("print('hello', flush=True); input()", r"TRL answered b'hello', which is no JSON object"),
        ("print('[1]', flush=True); input()", r"which is no JSON object"),
        ('print(\'{"error": "ValueError: 3"}\', flush=True); input()', r"TRL: ValueError: 3"),
    ],
)
def test_a_child_that_fails_says_why(child, program: str, message: str):
    with child(program) as taker, pytest.raises(WorkerError, match=message):
        taker.receive(20)


def test_asking_a_child_that_has_ended_is_an_error(child):
    with child("print('{}', flush=True)") as taker:
        taker.receive(20)
        time.sleep(0.5)  # its end of the pipe is closed by then, or soon
        with pytest.raises(WorkerError, match="TRL has ended"):
            taker.ask({"step": 1}, 20)


def test_the_child_and_what_it_has_started_end_with_the_context(child):
    program = (
        "import subprocess, sys, json\n"
        "own = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'pid': own.pid}), flush=True); sys.stdin.read()"
    )
    with child(program) as taker:
        pid = taker.receive(20)["pid"]
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
    """Stands for venv and pip: makes the Python, and notes what it was asked."""

    def __init__(self, fails: str = "") -> None:
        self.commands: list[list[str]] = []
        self._fails = fails

    def __call__(self, command: Sequence[str]) -> None:
        self.commands.append(list(command))
        if self._fails and self._fails in command:
            raise ConfigError("pip failed")
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()


def test_an_environment_is_made_once(tmp_path: Path):
    installer, said = Installer(), []
    python = make_environment(tmp_path / "cache", said.append, installer)
    assert python.exists()
    assert installer.commands[0] == [sys.executable, "-m", "venv", str(python.parent.parent)]
    assert installer.commands[1][:4] == [str(python), "-m", "pip", "install"]
    assert set(requirements()) <= set(installer.commands[1])
    assert len(said) == 1
    assert make_environment(tmp_path / "cache", said.append, installer) == python
    assert (len(installer.commands), len(said)) == (2, 1)


@pytest.mark.parametrize("damage", ["missing", "other", "garbage"])
def test_an_environment_that_is_not_whole_is_made_again(tmp_path: Path, damage: str):
    python = make_environment(tmp_path, lambda text: None, Installer())
    stamp, left = python.parent.parent / STAMP, python.parent / "left"
    left.touch()
    if damage == "missing":
        stamp.unlink()
    else:
        stamp.write_text("{" if damage == "garbage" else json.dumps({"packages": ["trl==0.1"]}))
    again = Installer()
    assert make_environment(tmp_path, lambda text: None, again) == python
    assert len(again.commands) == 2
    assert not left.exists()


def test_an_installation_that_fails_leaves_no_stamp(tmp_path: Path):
    with pytest.raises(ConfigError, match="pip failed"):
        make_environment(tmp_path, lambda text: None, Installer(fails="pip"))
    assert not list(tmp_path.glob(f"*/{STAMP}"))
    again = Installer()
    make_environment(tmp_path, lambda text: None, again)
    assert len(again.commands) == 2


def test_a_folder_that_cannot_be_written_to(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--environment .*file/cache cannot be written to"):
        make_environment(tmp_path / "file" / "cache", lambda text: None, Installer())


def test_torch_is_this_environments_own():
    import torch

    name, _, number = requirements()[0].partition("==")
    # Of a CUDA build the version's last part is nowhere but in torch.
    assert (name, Version(number).public) == ("torch", Version(torch.__version__).public)
    assert all("==" in one for one in requirements())


def test_a_command_that_fails_is_shown_with_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from hybridengine.bench import step_environment

    monkeypatch.setattr(step_environment, "requirements", lambda: ("no-such-package==0",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"(?s)cannot be made.*no-such-package.*PIP_EXTRA_INDEX_URL"):
        make_environment(tmp_path, lambda text: None)
