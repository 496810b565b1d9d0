"""How the first node of a launch carries out the run, without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridengine.launch import node
from hybridengine.launch.meeting import END, Meeting
from hybridengine.launch.node import NODE_LOST, Lead, run_node
from hybridengine.launch.ray_node import token_environment
from hybridengine.launch.stopping import Stopping
from tests.unit.test_launch_node import NoRay, task_of

SAVES = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(flush=True); time.sleep(60)"
)
SAVES_SLOWLY = """
import os, signal, sys, time
def save(*_):
    signal.signal(15, lambda *_: os._exit(1))
    time.sleep(2)
    sys.exit(7)
signal.signal(15, save)
print(flush=True)
time.sleep(60)
"""
HANGS = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def lead_of(folder: Path, said: list[str], *, attached: bool = False) -> Lead:
    task = replace(task_of(folder, 0, "a"), attached=attached)
    return Lead(
        task, Meeting(folder, print), Stopping(leads=True, attached=attached, say=said.append), said.append
    )


def started(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let a Python program take the place of the run, and wait until it takes signals."""
    real = node.fated

    def fated(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        process = real([command[0], "-c", program], stdout=subprocess.PIPE, **settings)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    monkeypatch.setattr(node, "fated", fated)


@pytest.mark.usefixtures("signals")
def test_a_run_waits_until_an_earlier_attempt_frees_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    held = [True, True, False]
    monkeypatch.setattr(node, "is_locked", lambda file: file == tmp_path / "run.lock" and held.pop(0))
    monkeypatch.setattr(node, "LOCK_POLL_S", 0.01)
    started(monkeypatch, "print()")
    said = list[str]()
    assert lead_of(tmp_path, said)._run("127.0.0.1:1", os.environ, ExitStack()) == 0
    assert not held
    assert said == [
        f"waiting for 750 s at most until an earlier attempt, or another run, frees {tmp_path}/run.lock"
    ]


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("program", "status"), [(SAVES, 7), (HANGS, 128 + signal.SIGKILL)])
def test_a_run_without_a_launcher_saves_its_step_within_the_limit(
    program: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(node, "SAVE_LIMIT_S", 1.0 if program == HANGS else 60.0)
    started(monkeypatch, program)
    lead = lead_of(tmp_path, [])
    lead._stopping.is_cut_off = True
    monkeypatch.setattr(Lead, "_wait_for_lock", lambda _: None)
    assert lead._run("127.0.0.1:1", os.environ, ExitStack()) == status


@pytest.mark.usefixtures("signals")
def test_a_run_that_saves_its_step_is_not_asked_again_when_its_launcher_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Asked twice, it ends without saving."""
    started(monkeypatch, SAVES_SLOWLY)
    lead = lead_of(tmp_path, [])
    lead._stopping.asked = True
    monkeypatch.setattr(Lead, "_wait_for_lock", lambda _: None)
    threading.Timer(0.5, setattr, (lead._stopping, "is_cut_off", True)).start()
    assert lead._run("127.0.0.1:1", os.environ, ExitStack()) == 7


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("on_one_machine", [False, True])
def test_nodes_that_have_left_ray_are_named_when_the_launch_ends(
    on_one_machine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Their launcher replaces them. Nodes at one address cannot be told from each other."""
    monkeypatch.setattr(node, "RayNode", NoRay)

    def meet(lead: Lead) -> str:
        if not on_one_machine:
            lead._addresses = {f"10.0.0.{number}": host for number, host in enumerate("abc", 1)}
        return "10.0.0.1"

    monkeypatch.setattr(Lead, "_meet", meet)
    monkeypatch.setattr(Lead, "_wait_for_nodes", lambda *_: None)
    monkeypatch.setattr(Lead, "_run", lambda *_: 1)
    monkeypatch.setattr(Lead, "_lost", lambda *_: ["c"])
    assert run_node(task_of(tmp_path, 0, "a", "b", "c"), print) == NODE_LOST
    end = Meeting(tmp_path, print).read(END)
    assert end is not None and (end["status"], end["cut_off"]) == (NODE_LOST, [] if on_one_machine else ["c"])


@pytest.mark.usefixtures("signals")
def test_the_other_nodes_know_the_end_before_output_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A reader that pauses keeps none but the first node."""
    ends = list[dict[str, Any] | None]()

    def run(_: Lead, address: str, environment: object, output: ExitStack) -> int:
        output.callback(lambda: ends.append(Meeting(tmp_path, print).read(END)))
        return 3

    monkeypatch.setattr(node, "RayNode", NoRay)
    monkeypatch.setattr(Lead, "_meet", lambda _: "10.0.0.1")
    monkeypatch.setattr(Lead, "_wait_for_nodes", lambda *_: None)
    monkeypatch.setattr(Lead, "_run", run)
    monkeypatch.setattr(Lead, "_lost", lambda *_: [])
    assert run_node(task_of(tmp_path, 0, "a", "b"), print) == 3
    assert [end and end["status"] for end in ends] == [3]


WRITES = """
import signal, sys, time
def save(*_):
    for number in range(5):
        print("saving", flush=True)
        time.sleep(0.1)
    sys.exit(7)
signal.signal(15, save)
print("step 1", flush=True)
time.sleep(60)
"""
LEADS = f"""
import os, sys, threading
from contextlib import ExitStack
from pathlib import Path
from hybridengine.launch import node
from tests.unit.test_launch_lead import lead_of
real = node.fated
node.fated = lambda command, **settings: real([command[0], "-c", {WRITES!r}], **settings)
lead = lead_of(Path(sys.argv[1]), [], attached=True)
with ExitStack() as output:
    status = lead._run("127.0.0.1:1", os.environ, output)
Path(sys.argv[1], "status").write_text(str(status))
"""


def test_a_run_may_write_when_nobody_reads_it_any_more(tmp_path: Path):
    """As one over ssh, whose launcher is killed."""
    command = [sys.executable, "-c", LEADS, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"step 1\n"
        process.stdout.close()
        process.stdin.close()
        process.wait(60)
    assert (tmp_path / "status").read_text() == "7"


def test_ray_asks_for_the_token_of_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where the user's environment says otherwise."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "disabled")
    environment = token_environment(tmp_path / "token", "10.0.0.1")
    assert {
        key: value for key, value in environment.items() if key.startswith(("RAY_AUTH", "RAY_ADDRESS"))
    } == {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
    }
