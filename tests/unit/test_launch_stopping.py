"""What a launcher over ssh says to the nodes of its launch on their standard input."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

ATTACHED = """
import sys, time
from hybridengine.launch.stopping import Stopping
stopping = Stopping(leads=sys.argv[1] == "leads", attached=True, say=lambda text: print(text, flush=True))
print("ready", flush=True)
while not stopping.asked:
    time.sleep(0.01)
print("asked", flush=True)
if sys.argv[1] == "waits":
    while not stopping.is_cut_off:
        time.sleep(0.01)
    stopping.check()
"""


def started(program: str, case: str) -> subprocess.Popen[bytes]:
    """Start a node; its standard input is what a launcher says."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program, case], stdin=pipe, stdout=pipe, stderr=pipe)


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
