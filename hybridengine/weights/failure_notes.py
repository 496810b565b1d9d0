"""Notes that failing ranks leave for each other, so that every error names the ranks that are really missing.

When one rank of a group dies, the others fail in different places: some wait for it, others for ranks that have stopped
because of it. Each leaves a note with whom it waited for; ranks that were waited for and have left none are missing.
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

GRACE_S = 2.0
"""Wait of a failing rank for the notes of those it waited for: they fail at about the same time."""


@dataclass(frozen=True)
class FailureNote:
    """Why a rank has stopped."""

    rank: int
    where: str
    """Operation and bucket."""
    waited_for: tuple[int, ...]
    """Ranks whose messages did not come; empty where the rank failed by itself."""
    reason: str


class FailureNotes:
    """Notes of the ranks of one group, in the store that the process groups have met in.

    Args:
        name: tells operations apart: the same on all ranks of the group, and used once.
    """

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        self._ranks, self._name = tuple(ranks), name

    def leave(self, note: FailureNote) -> None:
        """Leave a note for the others. Best effort: the store may have died with its rank."""
        value: Any = pickle.dumps(note)  # any bytes will do, though torch names texts only
        _within(GRACE_S, lambda: _store().set(self._key(note.rank), value))

    def read(self, awaited: Sequence[int], grace_s: float = GRACE_S) -> list[FailureNote] | None:
        """Notes left so far; waits a little for those of `awaited`, and of whom these have waited for.

        None where the store has died with its rank, or is as silent as that.
        """
        return _within(grace_s + GRACE_S, lambda: self._read(awaited, time.monotonic() + grace_s))

    def _read(self, awaited: Sequence[int], deadline: float) -> list[FailureNote]:
        store, wanted, found = _store(), set(awaited), dict[int, FailureNote]()
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
    """One line that says which ranks are missing, and why the others stopped.

    Args:
        notes: None where they cannot be read.
    """
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
    """Return the store's answer; None where it fails, or says nothing in time: a frozen process never answers."""
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


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
