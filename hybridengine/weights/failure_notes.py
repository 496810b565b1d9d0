"""Notes that failing ranks leave for each other, so that every error names the ranks that are actually missing.

When one rank of a group dies, the others fail in different places: some wait for it, others for ranks that stopped
because of it. Each leaves a note with the ranks it waited for; awaited ranks that left no note are missing.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")

GRACE_S = 5.0
"""Time that a failing rank waits for the notes of the ranks it waited for, which fail at about the same time."""
STORE_S = 2.0
"""Time in which the store must answer."""


@dataclass(frozen=True)
class FailureNote:
    """Reason why a rank stopped."""

    rank: int
    where: str
    """Operation and bucket."""
    waited_for: tuple[int, ...]
    """Ranks whose messages did not arrive; empty if the rank itself failed."""
    reason: str


class FailureNotes:
    """Notes of the ranks of one group about the operation `name`, in the group's store."""

    def __init__(self, ranks: Sequence[int], name: str, store: dist.Store) -> None:
        self._ranks, self._name, self._store = tuple(ranks), name, store

    def leave(self, note: FailureNote) -> None:
        """Leave a note for the other ranks. Best effort: the store may have died with its rank."""
        value: Any = pickle.dumps(note)  # torch accepts any bytes, though its annotation says str
        _within(STORE_S, lambda: self._store.set(self._key(note.rank), value))

    def read(self, awaited: Sequence[int], grace_s: float = GRACE_S) -> list[FailureNote] | None:
        """Return the notes after a short wait for those of `awaited` and of whom these await; None if the store fails."""
        return _within(grace_s + STORE_S, lambda: self._read(awaited, time.monotonic() + grace_s))

    def _read(self, awaited: Sequence[int], deadline: float) -> list[FailureNote]:
        store, wanted, found = self._store, set(awaited), dict[int, FailureNote]()
        while True:
            for rank in self._ranks:
                if rank not in found and store.check([self._key(rank)]):
                    found[rank] = pickle.loads(store.get(self._key(rank)))
                    wanted |= set(found[rank].waited_for)
            if wanted <= set(found) or time.monotonic() >= deadline:
                return [found[rank] for rank in sorted(found)]
            time.sleep(0.05)

    def _key(self, rank: int) -> str:
        return f"hybridengine/{self._name}/{rank}"


def explain(own: FailureNote, notes: Sequence[FailureNote] | None) -> str:
    """Return one line with the missing ranks and why the others stopped; `notes` is None if they cannot be read."""
    if notes is None:
        return (
            f"the rank that hosts the store is missing as well, or alone: ranks {list(own.waited_for)} may only have"
            " stopped because of it"
        )
    stopped = {note.rank: note for note in (*notes, own)}
    awaited = {rank for note in stopped.values() for rank in note.waited_for}
    missing = sorted(awaited - set(stopped))
    parts = []
    if missing:
        parts.append(f"missing ranks: {missing}")
    for note in stopped.values():
        if not note.waited_for and note.rank != own.rank:
            parts.append(f"rank {note.rank} failed by itself in {note.where}: {note.reason}")
    followers = sorted(rank for rank, note in stopped.items() if note.waited_for and rank != own.rank)
    if followers:
        waited = sorted({rank for follower in followers for rank in stopped[follower].waited_for})
        parts.append(f"ranks {followers} have stopped as well, waiting for ranks {waited}")
    return "; ".join(parts)


def _within(limit_s: float, ask: Callable[[], Answer]) -> Answer | None:
    """Return the store's answer, or None if it fails or does not answer in time, as a frozen process never does."""
    answers = SimpleQueue[Answer | None]()

    def put() -> None:
        answer = None
        with contextlib.suppress(RuntimeError):
            answer = ask()
        answers.put(answer)

    Thread(target=put, name="failure notes", daemon=True).start()
    with contextlib.suppress(Empty):
        return answers.get(timeout=limit_s)
    return None
