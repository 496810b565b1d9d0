"""Sampling requests that wait to be drawn together."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from hybridengine.serving.turns import Limits

POLL_S = 0.001
"""Time between two looks whether a request has been stored."""


class WaitingSamples:
    """Ids of sampling requests in the order of their arrival. `changed` is held during all calls but `arriving`."""

    def __init__(self, changed: threading.Condition, limits: Limits) -> None:
        self._changed, self._limits = changed, limits
        self._ids: list[str] = []
        self._last_s = -math.inf  # time of the last one
        self._arriving = 0  # those that are being stored; the connections' thread alone changes it

    def __bool__(self) -> bool:
        return bool(self._ids)

    def add(self, *request_ids: str) -> None:
        """Add requests that have arrived."""
        self._ids += request_ids
        self._last_s = time.monotonic()

    def put_back(self, request_ids: Sequence[str]) -> None:
        """Add requests that were collected, and are to be drawn again."""
        self._ids = [*request_ids, *self._ids]

    def withdraw(self, request_ids: Sequence[str]) -> list[str]:
        """Remove those of these requests that still wait; return them."""
        pending = [request_id for request_id in self._ids if request_id in request_ids]
        self._ids = [request_id for request_id in self._ids if request_id not in pending]
        return pending

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Let the requests that are there wait for another one, which the body of the context adds."""
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def collect(self, is_ending: Callable[[], bool]) -> list[str]:
        """Return all requests, after a wait for those that arrive at the same time; none once the server ends."""
        limits, end_s = self._limits, time.monotonic() + self._limits.collect_s
        while self._ids and not is_ending() and (now_s := time.monotonic()) < end_s:
            rest_s = self._last_s + limits.quiet_s - now_s
            if rest_s <= 0 and not self._arriving:
                break
            self._changed.wait(min(max(rest_s, POLL_S), end_s - now_s))
        if is_ending():
            return []
        collected, self._ids = self._ids, []
        return collected
