"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybridengine.metrics.keys import time_key


class Stopwatch:
    """Wall-clock seconds per phase.

        watch = Stopwatch()
        with watch("generate"):
            ...
        row |= watch.take()        # {"time/generate_s": 1.3}

    A phase entered several times adds up, one left by an exception counts too, and phases may nest (the outer
    one then includes the inner one). Work that was only started (a CUDA kernel, a remote call) must be waited
    for inside.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the seconds spent in the block to `phase`."""
        started = self._clock()
        try:
            yield
        finally:
            key = time_key(phase)
            self._seconds[key] = self._seconds.get(key, 0.0) + self._clock() - started

    def take(self) -> dict[str, float]:
        """The metrics `time/PHASE_s` since the last take, in order of the phases' first end."""
        taken, self._seconds = self._seconds, {}
        return taken
