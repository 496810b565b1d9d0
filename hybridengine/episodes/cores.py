"""Cores of this host, one for each process of a tool at a time: time limits then do not depend on how many tools run."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterable
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

from hybridengine.files import NO_LOCKS

LOOK_S = 0.02
"""Time between two looks for a core that another process has freed."""


class Cores:
    """Cores, each with a file in `folder` that a process locks while it uses the core.

    The system frees the locks of a process that ends.
    """

    def __init__(self, folder: Path, numbers: Iterable[int]) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._unused = deque(
            os.open(folder / str(number), os.O_CREAT | os.O_RDWR, 0o600) for number in numbers
        )
        self._turns = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a core and use it in the block; of an event loop's waiters, the first has the first one."""
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            while (core := self._taken()) is None:
                await asyncio.sleep(LOOK_S)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # of a file system without locks
                fcntl.flock(core, fcntl.LOCK_UN)
            self._unused.append(core)

    def _taken(self) -> int | None:
        """Take a core that no process uses; None if there is none. Threads may call it at once."""
        for _ in range(len(self._unused)):
            with contextlib.suppress(IndexError):
                core = self._unused.popleft()
                try:
                    fcntl.flock(core, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._unused.append(core)
                    continue
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        raise  # without locks, the cores are those of this process alone
                return core
        return None


@cache
def _cores() -> Cores:
    """Return the cores that this process may use, which all processes of this user on the host share."""
    numbers = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return Cores(Path(tempfile.gettempdir()) / f"hybridengine-cores-{os.getuid()}", sorted(numbers))


os.register_at_fork(after_in_child=_cores.cache_clear)  # a child's locks would be its parent's


def core_of_this_host() -> contextlib.AbstractAsyncContextManager[None]:
    """Wait for a core of this host, and use it in the block."""
    return _cores().one()
