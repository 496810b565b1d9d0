"""A reward function in a process of its own: limited in time, and restarted after a hang or crash."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridengine.data import reward_child
from hybridengine.errors import DataError
from hybridengine.guarded.process import GuardedProcess

SERVER = "hybridengine.data.reward_child:serve"
STACKS_S = 1.0
"""Time after the limit during which a function that does not return writes its stacks to stderr."""
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

    The process starts with the first call or with `start`, and restarts after a call that ended it. What it starts ends
    with it. It ends when this process ends, even abruptly.

    Args:
        path: "package.module:function".
        key: source of the path, for messages: "reward.function".
        offered: columns that callers can give in addition to responses and answers.
        otherwise: remedy of a failed call beside a correction of the function; by default the section's `on_failure`.
        start_timeout_s: time limit of a start, including the imports of the function's module.
    """

    def __init__(
        self,
        path: str,
        *,
        key: str = "reward.function",
        offered: Sequence[str] = (),
        otherwise: str | None = None,
        timeout_s: float = 60.0,
        start_timeout_s: float = 600.0,
        memory_bytes: int | None = None,
    ) -> None:
        self.path, self.key, self.timeout_s = path, key, timeout_s
        self._offered = tuple(offered)
        section = key.partition(".")[0]
        self._otherwise = otherwise or f"let {section}.on_failure retry or drop the rows"
        self._start_timeout_s, self._memory_bytes = start_timeout_s, memory_bytes
        self._process: GuardedProcess | None = None
        self._columns: tuple[str, ...] = ()

    def start(self) -> tuple[str, ...]:
        """Start the process if necessary; return the columns that each call must give.

        Raises DataError if the function cannot be loaded in time, or has an unsuitable signature.
        """
        if self._process is not None:
            return self._columns
        self._process = GuardedProcess(SERVER, self.path, "reward")
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
        self._process.note_group()
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
        where = named_rows(rows)
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
        message = f"{self.key}={self.path}, {where}: {text}; {remedy}, or {self._otherwise}"
        raise (RewardTimeoutError if kind == LATE else DataError)(f"{message}\n{trace}".rstrip())

    def close(self) -> None:
        """End the process and its descendants; a later call starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _exchange(self, request: tuple, timeout_s: float, num_rows: int = 0) -> Sequence[Any]:
        """Send a request and return the validated reply; without one, end the process and return why there is none."""
        assert self._process is not None, "it is started"
        channel = self._process.channel
        limit = time.monotonic() + timeout_s
        deadline = limit + STACKS_S
        try:
            channel.settimeout(max(1e-3, deadline - time.monotonic()))
            channel.sendall(json.dumps((*request, limit)).encode() + b"\n")
            line = _receive(channel, REPLY_BYTES + SCORE_BYTES * num_rows, deadline)
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
            text = self._process.end_text()
            self.close()
            return ENDED, f"its process {text}", None, ""
        except BaseException:  # KeyboardInterrupt: a late reply would be read as that of the next call
            self.close()
            raise


def named_rows(rows: Sequence[int]) -> str:
    """Return the rows of a call for messages: "row 3", or "rows 3 to 7"."""
    first, last = min(rows, default=0), max(rows, default=0)
    return f"row {first}" if len(rows) == 1 else f"rows {first} to {last}"


def _receive(channel: socket.socket, most_bytes: int, deadline: float) -> bytearray:
    """Return one received line; raises ValueError if it is longer than `most_bytes`."""
    received = bytearray()
    while not received.endswith(b"\n"):
        channel.settimeout(max(1e-3, deadline - time.monotonic()))
        part = channel.recv(2**20)
        if not part:
            raise EOFError
        received += part
        if len(received) > most_bytes:
            raise ValueError(f"more than {most_bytes} bytes")
    return received


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
