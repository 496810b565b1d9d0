"""Threads in which the functions of episodes call blocking code (`asyncio.to_thread`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

MOST_THREADS, LEAST_THREADS = 4096, 4
STACK_BYTES = 2**23
"""Memory that Linux reserves for a thread's stack."""
MOST_LEFT = 8
"""Calls that go on after their episodes, in threads that nothing can end, with which a process gets no new episodes."""

calls_of_episode: ContextVar[set[Future[Any]]] = ContextVar("calls_of_episode")
"""Calls of the episode whose code runs, its tasks included, that have not ended."""


class Threads(ThreadPoolExecutor):
    """A thread for each call at once; asyncio's own executor has a few for all of them, and calls that hang keep them.

    Args:
        memory_bytes: memory limit of the process; threads take an eighth of it at most, but for the first few.
    """

    def __init__(self, memory_bytes: int | None) -> None:
        fitting = MOST_THREADS if memory_bytes is None else memory_bytes // (8 * STACK_BYTES)
        num_threads = max(LEAST_THREADS, min(MOST_THREADS, fitting))
        super().__init__(num_threads)
        self.most_left = min(MOST_LEFT, num_threads // 2)
        """Calls of ended episodes with which the process should get no others."""
        self._left = set[Future[Any]]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = super().submit(fn, *args, **kwargs)
        if (calls := calls_of_episode.get(None)) is not None:
            _add(call, calls)
        return call

    def num_left(self, calls: set[Future[Any]]) -> int:
        """Note those of an ended episode's calls that go on; return how many do, of all ended episodes."""
        for call in calls:
            _add(call, self._left)
        return len(self._left)


def _add(call: Future[Any], calls: set[Future[Any]]) -> None:
    """Add a call to a set until it ends."""
    calls.add(call)
    call.add_done_callback(calls.discard)
