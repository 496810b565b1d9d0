"""What a launcher over ssh says to the nodes of its launch on their standard input."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ATTACHED = """
import os, sys, time
from hybridengine.launch.stopping import Stopping

def say(text):  # not by print, in which the signal may arrive
    os.write(1, f"{text}\\n".encode())

stopping = Stopping(leads=sys.argv[1] == "leads", attached=True, say=say)
print("ready", flush=True)
while not stopping.asked:
    time.sleep(0.01)
print("asked", flush=True)
if sys.argv[1] == "waits":
    while not stopping.is_cut_off:
        time.sleep(0.01)
    stopping.check()
"""


@contextmanager
def started(program: str, case: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a node; its standard input is what a launcher says."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, case]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as node:
        try:
            yield node
        finally:
            node.kill()


@pytest.mark.parametrize("case", ["leads", "follows", "waits"])
def test_a_node_hears_its_launcher(case: str):
    """A line on its input asks to stop, and its end is that of the launcher; a node also ends by itself."""
    with started(ATTACHED, case) as node:
        assert node.stdin is not None and node.stdout is not None and node.stderr is not None
        assert node.stdout.readline() == b"ready\n"
        node.stdin.write(b"stop\n")
        node.stdin.flush()
        if case != "leads":
            assert (
                node.stdout.readline()
                == b"SIGTERM: this node ends with the run, which the first node stops\n"
            )
        assert node.stdout.readline() == b"asked\n"
        if case == "waits":
            node.stdin.close()
            assert b"WorkerError: the connection to the launcher is gone" in node.stderr.read()
        assert node.wait(30) == (1 if case == "waits" else 0)


SIGNALLED = """
import os, signal, subprocess, sys, time
from hybridengine.cli.launch_options import note
from hybridengine.launch.stopping import Stopping
stopping = Stopping(leads=sys.argv[1] == "leads", attached=False, say=note)
run = subprocess.Popen(["sleep", "60"])
stopping.pass_to(run)
print("ready", flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGTERM)
print(run.wait() if sys.argv[1] == "leads" else run.poll())
run.kill()
"""


@pytest.mark.parametrize("case", ["leads", "follows"])
def test_signals_are_handled_also_if_nobody_reads_what_a_node_says(case: str):
    with started(SIGNALLED, case) as node:
        assert node.stdin is not None and node.stdout is not None and node.stderr is not None
        assert node.stdout.readline() == b"ready\n"
        node.stderr.close()
        node.stdin.close()
        assert node.stdout.read() == {"leads": b"-15\n", "follows": b"None\n"}[case]
        assert node.wait(30) == 0


@pytest.mark.parametrize("text", [b"\xff\nover\r\n", b"over"])
def test_a_node_takes_any_text_of_its_launcher(text: bytes):
    program = ATTACHED.replace("not stopping.asked", "not stopping.is_cut_off").replace(
        '"asked"', "stopping.is_over"
    )
    with started(program, "leads") as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"ready\n"
        output, _ = node.communicate(text, timeout=30)
        assert output == (b"True\n" if text.endswith(b"\r\n") else b"False\n")


TOLD = """
import subprocess, sys, time
from hybridengine.launch.stopping import Stopping
stopping = Stopping(leads=True, attached=True, say=print)
if sys.argv[1] == "runs":
    stopping.pass_to(subprocess.Popen(["true"]))
while not (stopping._lost and stopping.is_over):
    time.sleep(0.01)
stopping.check()
print("goes on without", stopping._lost)
"""


@pytest.mark.parametrize("case", ["waits", "runs"])
def test_the_first_node_is_told_of_a_host_that_fails(case: str):
    """It ends unless the run has begun, which knows whether it needs the host."""
    with started(TOLD, case) as node:
        assert node.stdin is not None and node.stdout is not None and node.stderr is not None
        for part in (b"over\nlost ", b"u@b\n"):
            node.stdin.write(part)
            node.stdin.flush()
            time.sleep(0.2)
        assert node.wait(60) == (0 if case == "runs" else 1)
        if case == "runs":
            assert node.stdout.read() == b"goes on without u@b\n"
        else:
            text = b"WorkerError: u@b has failed before the run began; see its lines above"
            assert text in node.stderr.read()
