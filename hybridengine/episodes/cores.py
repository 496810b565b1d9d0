"""Cores of this host, one for each process of a tool at a time: time limits then do not depend on how many tools run."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from functools import lru_cache
from pathlib import Path

LOOK_S = 0.02
"""Time between two looks for a core that another process has freed."""


class Cores:
    """Cores, each with a file in `folder` that a process locks while it uses the core; of one event loop.

    The system frees the locks of a process that ends.
    """

    def __init__(self, folder: Path, numbers: Iterable[int]) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._unused = [os.open(folder / str(number), os.O_CREAT | os.O_RDWR, 0o600) for number in numbers]
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a core and use it in the block; who comes first has the first one."""
        async with self._turn:
            while (core := self._taken()) is None:
                await asyncio.sleep(LOOK_S)
        try:
            yield
        finally:
            fcntl.flock(core, fcntl.LOCK_UN)
            self._unused.append(core)

    def _taken(self) -> int | None:
        """Take a core that no process uses; None if there is none."""
        for core in self._unused:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(core, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._unused.remove(core)
                return core
        return None


@contextlib.asynccontextmanager
async def core_of_this_host() -> AsyncIterator[None]:
    """Use one of the cores that this process may use, which all processes of this user on the host share."""
    async with _cores(asyncio.get_running_loop()).one():
        yield


@lru_cache(1)
def _cores(_: asyncio.AbstractEventLoop) -> Cores:
    """Return the cores for an event loop; a process of episodes has one loop."""
    numbers = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return Cores(Path(tempfile.gettempdir()) / f"hybridengine-cores-{os.getuid()}", sorted(numbers))
