"""Ray on one node of a launch: a child process, with which all of Ray's processes end."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hybridengine.errors import WorkerError
from hybridengine.files import writing
from hybridengine.temporary import make_short_folder

STOP_LIMIT_S = 20.0
"""Time limit for Ray's processes to end by themselves."""
PR_SET_PDEATHSIG = 1
LAST_LINES = 12
NOISE = re.compile(
    r"\(\S*\+0x[0-9a-f]+\) \[0x[0-9a-f]+\]|\s@\s+0x[0-9a-f]+\s|StackTrace Information|^\[state-dump\]"
)
"""Part of a line of Ray's output that gives no reason: a C++ stack, as "raylet(+0x8bbdcb) [0x5581bfcc0dcb] main" or
"@ 0x7f88b464524a main", or the raylet's state, which it prints in hundreds of lines."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
START_ATTEMPTS = 3
"""Number of attempts to start Ray, whose processes have 30 s: too short on a busy machine."""
STARTED = b"Ray runtime started"
"""What `ray start` prints once its processes answer."""
RAY_FOLDER = "ray"
LONGEST_PATH = f"/{RAY_FOLDER}/session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store"
"""Longest path of a socket of Ray in the folder of a node; the last number is that of a process."""
METRICS = "RAY_enable_metrics_collection"
CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Variable that is 0 where Ray is to stay at loopback: else it takes another address of the node in place of that."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0"}


class RayEnded(WorkerError):
    """Ray does not start on a node, or has ended there."""


def fated(command: list[str], **settings: object) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own that is killed when this process ends, however that happens."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def share_fate() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(command, start_new_session=True, preexec_fn=share_fate, **settings)  # pyright: ignore


def token_environment(token_file: Path, own_address: str) -> dict[str, str]:
    """Return this process's environment with the token of a launch, for Ray and its drivers on the node of an address."""
    environment = {**QUIET, **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
    environment.pop("RAY_AUTH_TOKEN", None)
    environment.pop("RAY_ADDRESS", None)
    if ipaddress.ip_address(own_address).is_loopback:
        environment[CLUSTER] = "0"
    return environment


class RayNode:
    """Ray's processes on this node; a context manager that ends them."""

    def __init__(
        self,
        own_address: str,
        head_address: str | None,
        environment: Mapping[str, str],
        log: Path,
        *,
        num_cpus: int,
        num_gpus: int | None,
        metrics_port: int | None = None,
    ) -> None:
        """Start Ray at an address of this node; as the head if `head_address` is None.

        Without `num_gpus`, Ray counts the GPUs. All ports but the head's are chosen by the system, and `metrics_port`,
        at which Ray exports metrics on all addresses; without it, they are exported at loopback or not at all.
        """
        self._own, self._head = own_address, head_address
        self._environment, self._log = dict(environment), log
        self._options = [f"--num-cpus={num_cpus}"] + ([] if num_gpus is None else [f"--num-gpus={num_gpus}"])
        if metrics_port is not None:
            self._options.append(f"--metrics-export-port={metrics_port}")
        elif not ipaddress.ip_address(own_address).is_loopback:  # Ray would listen on all addresses
            self._environment[METRICS] = "0"
        self._attempts = 0
        self._start()

    def _start(self) -> None:
        self._attempts += 1
        # Ray's /tmp/ray may be another user's. Ray lets all users write to its own folder, which is one level deeper.
        self._folder = make_short_folder("ray", len(LONGEST_PATH))
        self.address = self._head or _joined(self._own, _free_port(self._own))
        options = [f"--node-ip-address={self._own}", *self._options]
        if self._head is None:
            port = self.address.rpartition(":")[2]
            options += ["--head", f"--port={port}", "--include-dashboard=false"]
            options += [f"--ray-client-server-port={_free_port(self._own)}"]  # it cannot be left out
        else:
            options += [f"--address={self._head}"]
        options += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        options += [f"--temp-dir={self._folder / RAY_FOLDER}", "--disable-usage-stats", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        with writing(self._log), self._log.open("wb") as output:
            self._process = fated(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def __enter__(self) -> RayNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, deadline: float, check: Callable[[], None]) -> None:
        """Wait until Ray has started here; start it again if it ends before, as it does on a busy machine.

        `check` raises what makes waiting pointless; RayEnded at `deadline`, a time of `time.monotonic`, or if Ray has
        ended START_ATTEMPTS times.
        """
        while STARTED not in self._log.read_bytes():
            check()
            if self._process.poll() is not None and self._attempts < START_ATTEMPTS:
                self.stop()
                self._start()
            self.check()
            if time.monotonic() >= deadline:
                raise RayEnded(
                    f"Ray on host {socket.gethostname()} has not started within the limit; see {self._log}, or raise"
                    " --start-limit"
                )
            time.sleep(0.2)

    def check(self) -> None:
        """Raise RayEnded, with the end of Ray's output, if Ray has ended."""
        if self._process.poll() is None:
            return
        said = "\n  ".join(last_lines(self._log.read_text(errors="replace")))
        raise RayEnded(
            f"Ray on host {socket.gethostname()} has ended with status {self._process.returncode}; {self._log} says:\n"
            f"  {said}"
        )

    def stop(self) -> None:
        """End Ray's processes and remove their files; idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
        if self._process.poll() is None:
            self._process.kill()  # the kernel kills its children
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def last_lines(output: str) -> list[str]:
    """Return the end of Ray's output in plain text, without stacks and states, which would hide the reason above them."""
    lines = [COLOUR.sub("", line) for line in output.splitlines()]
    return [line for line in lines if line.strip() and not NOISE.search(line)][-LAST_LINES:]


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return listener.getsockname()[1]


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
