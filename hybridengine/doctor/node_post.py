"""A post on one node: it calls functions there and opens a port; and how nodes reach each other's ports. No Ray here."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

BLOCK_BYTES = 2**20
CONNECT_LIMIT_S = 5.0
SEND_LIMIT_S = 15.0
"""Limit of sending as a whole, after which a slow link is judged by what it has carried; and of a wait for an answer."""


@dataclass(frozen=True)
class Reached:
    """Answer of another node's port."""

    error: str = ""
    """Why it did not answer; empty if it did."""
    latency_s: float = 0.0
    """Time until the connection was established."""
    seconds: float = 0.0
    """Time for `num_bytes`, from the first one to the other side's answer."""
    num_bytes: int = 0
    """Bytes that arrived: fewer than were asked for if the link is slow."""


class NodePost:
    """Carries out what an examination asks of a node."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of this project or of the standard library on the node; return its result."""
        return function(*arguments)

    def open_port(self) -> int:
        """Accept connections at a port that the system chooses, as the store of a run does; return the port."""
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=128)
        threading.Thread(target=_answer, args=(self._listener,), daemon=True).start()
        return int(self._listener.getsockname()[1])


def reach(others: Sequence[tuple[str, int]], num_bytes: int = 0) -> list[Reached]:
    """Connect to each of the ports, one after the other, and send bytes there."""
    return [_reach(host, port, num_bytes) for host, port in others]


def _answer(listener: socket.socket) -> None:
    """Read each connection to its end and acknowledge it, until the listener is closed."""

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
    """Return the seconds by which another clock is ahead of this one, and the largest error of that figure.

    The answer that took the shortest counts: its clock was read somewhere between question and arrival.
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
