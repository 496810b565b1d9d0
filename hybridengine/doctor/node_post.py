"""A post on one node: it knows the time, opens a port, and reaches the ports of others. No Ray here."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridengine.doctor.node_facts import (
    FolderFacts,
    NodeFacts,
    leave_mark,
    lock_is_seen,
    marks_seen,
    node_facts,
    try_folder,
    unreadable,
)

BLOCK_BYTES = 2**20
CONNECT_LIMIT_S = 5.0
SEND_LIMIT_S = 15.0
"""Of sending as a whole: a slow link is told by what it carried until then; and of a wait for the other side."""


@dataclass(frozen=True)
class Reached:
    """How a port of another node answered."""

    error: str = ""
    """Why it did not; empty where it did."""
    latency_s: float = 0.0
    """Until a connection stood."""
    seconds: float = 0.0
    """For `num_bytes`, from the first one to the other side's answer."""
    num_bytes: int = 0
    """That arrived: fewer than were asked for where the link is slow."""


class NodePost:
    """Carries out what an examination asks of a node."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._listener: socket.socket | None = None
        self._mark: Path | None = None

    def facts(self) -> NodeFacts:
        """What the node says about itself."""
        return node_facts(self._node)

    def now(self) -> float:
        """Seconds since the epoch, by the node's clock."""
        return time.time()

    def try_folder(self, folder: str) -> FolderFacts:
        """Whether the node can write there."""
        return try_folder(folder)

    def unreadable(self, paths: list[str]) -> dict[str, str]:
        """Those that the node cannot read -> why."""
        return unreadable(paths)

    def leave_mark(self, folder: str) -> str:
        """Make a file for other nodes to find; its name."""
        self._mark = Path(folder) / leave_mark(folder)
        return self._mark.name

    def marks_seen(self, folder: str, names: list[str]) -> list[str]:
        """Those of the files that this node can read."""
        return marks_seen(folder, names)

    def lock_is_seen(self, folder: str, name: str) -> bool:
        """Whether the node notices a lock of another one."""
        return lock_is_seen(folder, name)

    def remove_mark(self) -> None:
        """Remove the file that this node made."""
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)

    def open_port(self) -> int:
        """Take whatever comes at a port that the system chooses, as the store of a run and its rows do; the port."""
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=128)
        threading.Thread(target=_answer, args=(self._listener,), daemon=True).start()
        return int(self._listener.getsockname()[1])

    def reach(self, others: Sequence[tuple[str, int]], num_bytes: int = 0) -> list[Reached]:
        """How each of the ports answers, one after the other."""
        return [_reach(host, port, num_bytes) for host, port in others]


def _answer(listener: socket.socket) -> None:
    """Read connections to their ends and say so; until the listener is closed."""

    def read(connection: socket.socket) -> None:
        buffer = bytearray(BLOCK_BYTES)
        with contextlib.suppress(OSError), connection:
            connection.settimeout(SEND_LIMIT_S)
            while connection.recv_into(buffer):
                pass
            connection.sendall(b".")

    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=read, args=(connection,), daemon=True).start()


def _reach(host: str, port: int, num_bytes: int) -> Reached:
    block = memoryview(bytes(min(num_bytes, BLOCK_BYTES)))
    try:
        begin = time.perf_counter()
        with socket.create_connection((host, port), timeout=CONNECT_LIMIT_S) as connection:
            latency = time.perf_counter() - begin
            connection.settimeout(SEND_LIMIT_S)
            begin, sent = time.perf_counter(), 0
            while sent < num_bytes and time.perf_counter() - begin < SEND_LIMIT_S:
                sent += connection.send(block[: num_bytes - sent])
            connection.shutdown(socket.SHUT_WR)
            if connection.recv(1) != b".":
                return Reached(error="the connection was closed before all bytes had arrived")
            return Reached("", latency, time.perf_counter() - begin, sent)
    except OSError as error:
        return Reached(error=f"{type(error).__name__}: {error.strerror or error}")


def clock_offset(ask: Callable[[], float], times: int = 5) -> tuple[float, float]:
    """Seconds by which another clock is ahead of this one, and how far that may be wrong.

    The answer that took the shortest counts: it was given somewhere between its question and its arrival.
    Source: RFC 5905, section 8.
    """
    best = (0.0, float("inf"))
    for _ in range(times):
        begin = time.time()
        there = ask()
        end = time.time()
        if (doubt := (end - begin) / 2) < best[1]:
            best = there - (begin + end) / 2, doubt
    return best
