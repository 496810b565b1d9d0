"""Ranks of a group on this host that may read each other's memory, and notes between them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.runtime import process_memory
from hybridengine.runtime.transport import PeerError

MAX_NOTE_BYTES = 2**20

_HEADER = struct.Struct("<cq")


class Neighbours:
    """Making it is collective over the group.

    Args:
        timeout_s: how long a rank is waited for.

    Where the system lets only relatives read memory (Linux, kernel.yama.ptrace_scope=1), ranks that the same process
    has started may.

    Raises:
        PeerError: two ranks that can read each other's memory could not connect.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._own, self._timeout_s = dist.get_rank(), timeout_s
        ranks = dist.get_process_group_ranks(group)
        self._notes: dict[tuple[int, str, int], bytes] = {}
        self._sockets: dict[int, socket.socket] = {}
        token = torch.tensor([secrets.randbits(62)])
        process_memory.admit_siblings()
        with contextlib.ExitStack() as stack:
            listener, path = None, ""  # without a socket, this rank has messages only
            with contextlib.suppress(OSError):
                listener, path = stack.enter_context(_listening())
            host = process_memory.host() if path else ""
            card = _Card(host, os.getpid(), token.data_ptr(), int(token.item()), path)
            cards = _gathered(card, group)
            self._pids = {rank: other.pid for rank, other in zip(ranks, cards, strict=True)}
            readable = {
                rank for rank, other in zip(ranks, cards, strict=True) if self._can_read(rank, other, card)
            }
            everyone = dict(zip(ranks, _gathered(readable, group), strict=True))
            self.ranks = frozenset(rank for rank in readable if self._own in everyone[rank])
            """Ranks with which memory is shared both ways."""
            self.are_all = all(len(found) == len(ranks) - 1 for found in everyone.values())
            """Whether all ranks of the group are neighbours of each other: the same on every rank."""
            by_rank = dict(zip(ranks, cards, strict=True))
            for rank in sorted(self.ranks):
                if rank < self._own:
                    self._connect(rank, by_rank[rank])
            while listener is not None and len(self._sockets) < len(self.ranks):
                self._accept(listener, by_rank)
            _gathered(None, group)  # the folder of the sockets goes, and the token

    def tell(self, rank: int, about: str, number: int, content: bytes = b"") -> None:
        """Leave a note with a neighbour; returns at once.

        Args:
            about, number: what the neighbour hears it by; `about` is one letter.

        Raises:
            PeerError: the neighbour has ended.
        """
        try:
            self._connection(rank).send(_HEADER.pack(about.encode(), number) + content)
        except OSError as error:
            raise PeerError((rank,), f"rank {rank} cannot be told: {error}") from error

    def hear(self, rank: int, about: str, number: int) -> bytes:
        """Wait for a note of a neighbour, which it leaves once; other notes are kept.

        Raises:
            PeerError: the neighbour has ended, or has said nothing before the timeout.
        """
        connection = self._connection(rank)
        deadline = time.monotonic() + self._timeout_s
        while (rank, about, number) not in self._notes:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                note = connection.recv(MAX_NOTE_BYTES)
            except TimeoutError as error:
                raise PeerError((rank,), f"rank {rank} has not answered for {self._timeout_s:g} s") from error
            except OSError as error:
                raise PeerError((rank,), f"rank {rank} cannot be heard: {error}") from error
            if not note:
                raise PeerError((rank,), f"rank {rank} has closed the connection")
            heard_about, heard_number = _HEADER.unpack_from(note)
            self._notes[rank, heard_about.decode(), heard_number] = note[_HEADER.size :]
        return self._notes.pop((rank, about, number))

    def read(self, rank: int, address: int, target: Tensor) -> None:
        """Fill a contiguous tensor with what is at an address of a neighbour.

        Raises:
            PeerError: the neighbour has ended, or has no such memory any more.
        """
        try:
            process_memory.read(self._pids[rank], [(address, target.data_ptr(), target.nbytes)])
        except OSError as error:
            raise PeerError((rank,), f"the memory of rank {rank} cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Close all connections; neighbours that wait for this rank end at once."""
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()

    def _connection(self, rank: int) -> socket.socket:
        if rank not in self._sockets:
            raise PeerError(
                (rank,),
                "connections were closed when a switch had failed; make the engine anew, on a process group of its own",
            )
        return self._sockets[rank]

    def _can_read(self, rank: int, card: _Card, own: _Card) -> bool:
        """Whether a rank's token and socket are where it says: its names may mean others here."""
        if rank == self._own or not own.host or card.host != own.host or not Path(card.path).exists():
            return False
        found = torch.zeros(1, dtype=torch.int64)
        with contextlib.suppress(PeerError):
            self.read(rank, card.address, found)
        return int(found.item()) == card.token

    def _connect(self, rank: int, card: _Card) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(self._timeout_s)
        try:
            with _short(card.path) as path:
                connection.connect(path)
            connection.send(f"{self._own} {card.token}".encode())
        except OSError as error:
            raise PeerError((rank,), f"rank {rank} cannot be reached: {error}") from error
        self._sockets[rank] = connection

    def _accept(self, listener: socket.socket, cards: dict[int, _Card]) -> None:
        listener.settimeout(self._timeout_s)
        missing = sorted(self.ranks - set(self._sockets))
        try:
            connection, _ = listener.accept()
            connection.settimeout(self._timeout_s)
            rank, token = map(int, connection.recv(64).split())
        except (OSError, ValueError) as error:
            raise PeerError(tuple(missing), f"ranks {missing} have not connected: {error}") from error
        if rank in missing and token == cards[self._own].token:
            self._sockets[rank] = connection
        else:
            connection.close()


@dataclass(frozen=True)
class _Card:
    """What a rank says of itself, for others to try."""

    host: str
    """Empty where memory cannot be shared."""
    pid: int
    address: int
    """Of the token."""
    token: int
    path: str
    """Of the socket that it listens at."""


@contextlib.contextmanager
def _listening() -> Iterator[tuple[socket.socket, str]]:
    """A socket in a folder that only this user can open, and its path, while the context is open."""
    folder = tempfile.mkdtemp(prefix="hybridengine-")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            path = f"{folder}/rank"
            with _short(path) as short:
                listener.bind(short)
            listener.listen(128)
            yield listener, path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """Another name of a file while the context is open: a socket's must have less than 108 characters."""
    folder, name = os.path.split(path)
    if len(path) < 100:
        yield path
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def _gathered(own: object, group: dist.ProcessGroup) -> list:
    everyone: list[object] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, own, group=group)
    except RuntimeError as error:
        others = tuple(rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank())
        raise PeerError(others, f"not all of them have come to make a transport: {error}") from error
    return everyone
