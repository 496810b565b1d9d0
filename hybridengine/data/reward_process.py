"""A reward function in a separate process: limited in time, restarted after a hang or crash, and ended with this process.

The function inherits the environment, without the variables that make a process a rank of this world, a Ray worker or a
GPU user, and the module search path. Its working directory is a temporary folder. Its output goes to this process's
stderr. Torch, Ray and Megatron are not loaded unless the function imports them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridengine.data import reward_child
from hybridengine.errors import DataError
from hybridengine.temporary import make_folder

BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    " from hybridengine.data.reward_child import main; main(int(sys.argv[1]))"
)

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

STACKS_S = 1.0
"""Time after the limit during which a function that does not return writes its stacks to stderr."""
ENDING_S = 5.0
"""Time limit for a process to end after closing its connection."""
END_TIMEOUT_S = 10.0
REPLY_BYTES = 2**20
"""Longest reply apart from scores; the function's process shortens its texts to less."""
SCORE_BYTES = 32
"""Additional bytes of a reply per row: one number as JSON."""
ENDED, LATE = "ended", "late"
"""Kinds of what stands for a reply if none arrived, because the process ended or the time limit passed."""


class RewardTimeoutError(DataError):
    """A call of a function exceeded its time limit."""


class RewardProcess:
    """One function in one process, called as function(responses, answers, **columns).

    The process starts with the first call or with `start`, and restarts after a call that ended it. Its children end
    with it, unless they leave its session. It ends when this process ends, even abruptly.

    Args:
        path: "package.module:function".
        key: source of the path, for messages: "reward.function".
        offered: columns that callers can give in addition to responses and answers.
        start_timeout_s: time limit of a start, including the imports of the function's module.
    """

    def __init__(
        self,
        path: str,
        *,
        key: str = "reward.function",
        offered: Sequence[str] = (),
        timeout_s: float = 60.0,
        start_timeout_s: float = 600.0,
        memory_bytes: int | None = None,
    ) -> None:
        self.path, self.key, self.timeout_s = path, key, timeout_s
        self._offered = tuple(offered)
        self._start_timeout_s, self._memory_bytes = start_timeout_s, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._columns: tuple[str, ...] = ()
        self._group: int | None = None
        """Process group of the function, once it is loaded."""

    def start(self) -> tuple[str, ...]:
        """Start the process if necessary; return the columns that each call must give.

        Raises DataError if the function cannot be loaded in time, or has an unsuitable signature.
        """
        if self._process is not None:
            return self._columns
        self._open()
        load = ("load", self.key, self.path, self._offered, self._memory_bytes)
        kind, *content = self._exchange(load, self._start_timeout_s)
        if kind != "loaded":
            self.close()
            text, _, trace = content
            if kind == "raised":
                text = f"{self.key}={self.path} {text} when it was imported; correct the module"
            elif kind in (ENDED, LATE):
                remedy = "correct the function" + (" or raise timeouts.start_s" if kind == LATE else "")
                text = f"{self.key}={self.path}, while it was loaded: {text}; {remedy}"
            raise DataError(f"{text}\n{trace}".rstrip())
        self._columns = ("responses", "answers", *content[0])
        assert self._process is not None, "it has just answered"
        self._group = _only_child(self._process.pid)
        return self._columns

    def call(self, columns: Mapping[str, Sequence[Any]], rows: Sequence[int] | None = None) -> list[float]:
        """Return the function's scores: a finite number for each response.

        Args:
            columns: at least the columns that `start` returns, each with one value per row.
            rows: row numbers for messages; counted from 0 by default.

        Raises:
            RewardTimeoutError: the function did not return in time.
            DataError: the function raised, ended its process, or returned invalid scores.
        """
        wanted = {name: list(columns[name]) for name in self.start()}
        rows = range(len(wanted["responses"])) if rows is None else rows
        first, last = min(rows, default=0), max(rows, default=0)
        where = f"row {first}" if len(rows) == 1 else f"rows {first} to {last}"
        kind, *content = self._exchange(("call", wanted), self.timeout_s, num_rows=len(rows))
        if kind == "scores":
            return content[0]
        text, row, trace = content
        section = self.key.partition(".")[0]
        remedy = "correct the function"
        if kind == LATE:
            remedy = f"raise {section}.timeout_s, lower {section}.rows_per_call, {remedy}"
        if row is not None and len(rows) > 1:
            where = f"row {rows[row]}" if kind == "wrong" else f"{where}, with row {rows[row]} at hand"
        message = f"{self.key}={self.path}, {where}: {text}; {remedy}, or let {section}.on_failure retry or drop the rows"
        raise (RewardTimeoutError if kind == LATE else DataError)(f"{message}\n{trace}".rstrip())

    def close(self) -> None:
        """End the process and its descendants; a later call starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):
            # A byte, since closing has no effect while a fork of this process holds the other end.
            os.write(process.stdin.fileno(), b".")
        process.stdin.close()
        try:
            code = process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code < 0:  # the guard was killed, and can no longer end the function
            if self._group is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._group, signal.SIGKILL)
            shutil.rmtree(self._folder, ignore_errors=True)
        self._group = None
        self._channel.close()

    def _open(self) -> None:
        """Start the guard, which starts the function's process."""
        self._channel, theirs = socket.socketpair()
        self._folder = make_folder("reward")
        with theirs:
            places = json.dumps([os.path.abspath(place) for place in sys.path])
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, str(theirs.fileno()), places, self.path],
                stdin=subprocess.PIPE,  # the lifeline: nothing is written to it before the end
                stdout=2,
                stderr=2,
                pass_fds=(theirs.fileno(),),
                env=child_environment(os.environ),
                cwd=self._folder,
                start_new_session=True,
            )

    def _exchange(self, request: tuple, timeout_s: float, num_rows: int = 0) -> Sequence[Any]:
        """Send a request and return the validated reply; without one, end the process and return why there is none."""
        limit = time.monotonic() + timeout_s
        deadline = limit + STACKS_S
        try:
            self._channel.settimeout(max(1e-3, deadline - time.monotonic()))
            self._channel.sendall(json.dumps((*request, limit)).encode() + b"\n")
            line = self._receive(REPLY_BYTES + SCORE_BYTES * num_rows, deadline)
            return checked_reply(line, self._offered, num_rows)
        except ValueError as error:
            self.close()
            return ENDED, f"its process sent what is not a reply ({error})", None, ""
        except (TimeoutError, EOFError, ConnectionError):
            # After the limit, it may also crash while writing its stacks, which other threads change meanwhile.
            if time.monotonic() >= limit:
                self.close()
                text = f"did not return within {timeout_s:g} s, and was ended"
                return LATE, f"{text} (its stacks are in the log above)", None, ""
            assert self._process is not None, "called with a process"
            text = "closed its connections"
            with contextlib.suppress(subprocess.TimeoutExpired):
                text = f"ended, {_exit_text(self._process.wait(ENDING_S))}"
            self.close()
            return ENDED, f"its process {text}", None, ""
        except BaseException:  # KeyboardInterrupt: a late reply would be read as that of the next call
            self.close()
            raise

    def _receive(self, most_bytes: int, deadline: float) -> bytearray:
        """Return one received line; raises ValueError if it is longer than `most_bytes`."""
        received = bytearray()
        while not received.endswith(b"\n"):
            self._channel.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._channel.recv(2**20)
            if not part:
                raise EOFError
            received += part
            if len(received) > most_bytes:
                raise ValueError(f"more than {most_bytes} bytes")
        return received


def _only_child(pid: int) -> int | None:
    """Return the process that a guard has forked, which leads a group of its own; None if it has ended."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None
    return None


def checked_reply(line: bytes | bytearray, offered: Sequence[str], num_rows: int) -> Sequence[Any]:
    """Return a reply of `reward_child.serve`; raise ValueError if the function has tampered with it."""
    try:
        reply = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deep") from None
    match reply:
        case ["loaded", list(columns)]:
            is_valid = all(column in offered for column in columns)
        case ["scores", list(scores)]:
            is_valid = len(scores) == num_rows and all(map(_is_score, scores))
        case ["raised" | "wrong", str(), row, str()]:
            is_valid = row is None or (type(row) is int and 0 <= row < num_rows)
        case _:
            is_valid = False
    if not is_valid:
        raise ValueError(reward_child.shown(reply))
    return reply


def _is_score(value: object) -> bool:
    return isinstance(value, float) and abs(value) <= reward_child.LARGEST_SCORE


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a function's process, without GPUs, rank and Ray variables."""
    others = ("RAY_", "TORCHELASTIC_")
    kept = [name for name in environment if name not in RANK_VARIABLES and not name.startswith(others)]
    return {name: environment[name] for name in kept} | dict.fromkeys(GPU_VARIABLES, "")


def _exit_text(code: int) -> str:
    number = -code if code < 0 else code - reward_child.SIGNAL_EXIT_CODE
    if number not in set(signal.Signals):
        return f"exit code {code}"
    name = signal.Signals(number).name
    memory = ", most likely for lack of memory" if number == signal.SIGKILL else ""
    return f"killed by {name}{memory}"
