"""A tiny run over two hosts whose network, memory, clock or folder fails in the middle, and what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hybridengine.report.step_rows import Row, read_rows
from tests.full.tiny_runs import SECTIONS, computed
from tests.machines.hosts import ROOT, Host, Network
from tests.machines.ray_nodes import COMMAND, RayCluster
from tests.warm_workers import warm_program

NAMES = ("first", "second")
STEPS = 5
FAULT_AFTER = "checkpoint of step 2 saved"
"""Line of the run's output after which the fault is made."""
CALL_S, SAVE_S, START_S = 40, 20, 60
NODE_LOST_S = 65
"""Seconds in which Ray's health checks give a node up: 5 of them fail in turn, each after 10 s, with 3 s in between."""
DIAGNOSIS_S = 60
"""Seconds in which the nodes that are left have been examined."""
BUSY_S = 120
"""Seconds that the tests' machine may need for what takes a few when it has nothing else to do."""


def add_dead_interface(network: Network) -> list[str]:
    """Give each host an interface that leads nowhere, and return their addresses on it."""
    addresses = [f"10.99.0.{number}" for number, _ in enumerate(network.hosts, 1)]
    for host, address in zip(network.hosts, addresses, strict=True):
        host.run("ip", "tuntap", "add", "dev", "dead0", "mode", "tap")
        host.run("ip", "addr", "add", f"{address}/24", "dev", "dead0")
        host.run("ip", "link", "set", "dead0", "up")
    return addresses


class MountedFolder:
    """A host's own mount of a folder that hosts share, through a process that can be stopped: then the mount hangs."""

    def __init__(self, host: Host, folder: Path, *options: object) -> None:
        """Mount the folder on top of itself; `options` are those of bindfs."""
        locks = ("--multithreaded", "--enable-lock-forwarding")  # they are seen by the other hosts
        self._server = host.start("bindfs", "-f", *locks, *options, folder, folder)
        deadline = time.monotonic() + BUSY_S
        while f" {folder} fuse " not in host.run("cat", "/proc/mounts").stdout:
            assert time.monotonic() < deadline and self._server.poll() is None, "bindfs has not mounted it"
            time.sleep(0.05)

    def hang(self) -> None:
        """Answer nobody any more."""
        self._server.send_signal(signal.SIGSTOP)

    def answer(self) -> None:
        """Answer again, also what was asked meanwhile."""
        self._server.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Remove the mount."""
        self._server.terminate()
        self._server.wait(BUSY_S)


@dataclass(frozen=True)
class Left:
    """What a run has left: metrics by step, without those of the machine, and its weights."""

    rows: Mapping[float | int | None, Row]
    weights: bytes


class Job:
    """A command on a host that is being carried out, and its output."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._lines = process, list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)

    @property
    def console(self) -> str:
        """Output so far."""
        return "".join(self._lines)

    def wait_for(self, text: str, limit_s: float) -> None:
        """Wait until a text is in the output."""
        deadline = time.monotonic() + limit_s
        while text not in self.console:
            assert self._process.poll() is None, self.console
            assert time.monotonic() < deadline, f"no {text!r} within {limit_s:g} s: {self.console}"
            time.sleep(0.02)

    def end(self, limit_s: float) -> int:
        """Wait until the command has ended, and return its status."""
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"it has not ended within {limit_s:g} s: {self.console}") from None
        self._reader.join(10)
        return status


def write_run(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write the configuration of the run, with changes in its sections; return its file."""
    changes: dict[str, dict[str, Any]] = {
        "run": SECTIONS["run"] | {"steps": STEPS, "folder": str(folder / "runs")},
        "cluster": {"ranks_per_node": [1, 1]},
        "actor": SECTIONS["actor"] | {"parallel": "1-2-1", "generate": "1-1"},
        "critic": SECTIONS["critic"] | {"parallel": "2-1-1"},
        "reference": {"parallel": "1-1-2"},
        "reward": SECTIONS["reward"] | {"timeout_s": 15},
        "timeouts": {"start_s": START_S, "call_s": CALL_S, "save_s": SAVE_S},
        "checkpoint": {"every": 1},
    }
    for name, values in sections.items():
        changes[name] = (changes.get(name) or SECTIONS.get(name) or {}) | values
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(SECTIONS | changes))
    return file


def start(cluster: RayCluster, *command: object, host: int = 0) -> Job:
    """Start a command of this project on a host of a cluster."""
    environment = cluster.variables | {"RAY_ADDRESS": cluster.address}
    program = warm_program(COMMAND, *command)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return Job(cluster.hosts[host].start(*program, env=environment, **streams))


def train_undisturbed(folder: Path, warm_ray: Mapping[str, str]) -> Left:
    """Carry out the run on this machine, with a Ray of its own."""
    file = write_run(folder, cluster={"ranks_per_node": [2]})
    done = subprocess.run(
        warm_program(COMMAND, "train", file),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, **warm_ray},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return left_in(folder)


def left_in(folder: Path) -> Left:
    """Return what the run in a folder has left; a step that was repeated counts as it was the last time."""
    run = folder / "runs" / "run"
    rows = {row["step"]: row for row in computed(read_rows(run))}
    return Left(rows, (run / "final" / "model.safetensors").read_bytes())
