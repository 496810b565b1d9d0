"""Faults that scripts/soak.py injects, and the process of the run that they hit."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridengine.report.step_rows import Row, read_rows

NUM_RANKS = 4
"""Ranks of the main job."""
PATIENCE_S = 300.0
"""Longest wait for the next row, from a cold start or after a fault."""
FILE_BYTES = 50_000
"""Largest file on a full disk: less than a rank's part of a checkpoint."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault, its time and its victim."""

    after_step: int
    share: float
    """Share of a step that passes after the row of `after_step`."""
    kind: str
    rank: int


def faults_of(steps: int, every: int, seed: int) -> list[Fault]:
    """Return about one fault in `every` steps; each kind occurs once before any occurs again."""
    chance, kinds, found = random.Random(seed), list[str](), list[Fault]()
    for middle in range(every, steps - every // 4, every):
        if not kinds:
            kinds = chance.sample(list(KINDS), len(KINDS))
        step = middle + chance.randint(-every // 3, every // 3)
        found.append(Fault(step, chance.random(), kinds.pop(), chance.randrange(NUM_RANKS)))
    return found


def kill_rank(run: RunProcess, rank: int) -> None:
    """Kill one rank's process."""
    os.kill(run.ranks()[rank], signal.SIGKILL)


def stop_rank(run: RunProcess, rank: int) -> None:
    """Stop one rank's process, so that it hangs."""
    os.kill(run.ranks()[rank], signal.SIGSTOP)


def fill_disk(run: RunProcess, rank: int) -> None:
    """Let one rank fail to write a checkpoint until the run has reported it."""
    pid = run.ranks()[rank]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    run.await_said("warning: no checkpoint")
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def kill_controller(run: RunProcess, rank: int) -> None:
    """Kill the controller; its Ray and its ranks have to notice."""
    os.kill(run.pid, signal.SIGKILL)


def kill_everything(run: RunProcess, rank: int) -> None:
    """Kill every process, as a power failure does."""
    for pid in [run.pid, *descendants(run.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_raylet(run: RunProcess, rank: int) -> None:
    """Kill the raylet, and with it the node."""
    (raylet,) = (pid for pid in descendants(run.pid) if command_of(pid).partition(" ")[0].endswith("/raylet"))
    os.kill(raylet, signal.SIGKILL)
    run.await_said("failed in step")


def terminate(run: RunProcess, rank: int) -> None:
    """Terminate the run, as a scheduler does that needs the machine."""
    os.kill(run.pid, signal.SIGTERM)


KINDS = {
    "killed rank": kill_rank,
    "stopped rank": stop_rank,
    "full disk": fill_disk,
    "killed controller": kill_controller,
    "kill -9 of everything": kill_everything,
    "killed node": kill_raylet,
    "SIGTERM": terminate,
}


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    found = list[int]()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return [*found, *(one for child in found for one in descendants(child))]


def command_of(pid: int) -> str:
    """Return a process's command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


class RunProcess:
    """`hybridengine train` in a process of its own; its output goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, folder: Path) -> None:
        self._command, self._log, self.folder = command, log, folder
        self.start()

    def start(self) -> None:
        """Start or resume the run."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)

    @property
    def pid(self) -> int:
        """Process id of the controller."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return True if the controller is alive."""
        return self._process.poll() is None

    def status(self) -> int:
        """Wait for the end of the run and return its exit status."""
        return self._process.wait(PATIENCE_S)

    def end(self) -> None:
        """End all processes of the run."""
        kill_everything(self, 0)
        self._process.wait(PATIENCE_S)

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks in the order in which they started; waits until all have started."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = sorted(
                pid for pid in descendants(self.pid) if command_of(pid).startswith("ray::RankProcess")
            )
            if len(found) == NUM_RANKS:
                return found
            time.sleep(0.1)
        raise SystemExit(f"there are no {NUM_RANKS} ranks: see {self._log}")

    def rows(self) -> list[Row]:
        """Return the rows written so far, including repeated ones."""
        return read_rows(self.folder)

    def await_said(self, text: str) -> None:
        """Wait until the run has printed the text once more or has ended."""
        said, deadline = self.log_text().count(text), time.monotonic() + PATIENCE_S
        while self.log_text().count(text) == said and self.is_alive():
            if time.monotonic() > deadline:
                raise SystemExit(f"{text!r} was not said within {PATIENCE_S:g} s: see {self._log}")
            time.sleep(0.1)

    def log_text(self) -> str:
        """Return the run's output."""
        return self._log.read_text(errors="replace")
