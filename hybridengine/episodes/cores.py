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

QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processor time in each period, and the period, of the container (cgroups of version 2)."""
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
                except OSError as error:
                    if (
                        error.errno not in NO_LOCKS
                    ):  # without locks, the cores are those of this process alone
                        self._unused.append(core)
                        if not isinstance(error, BlockingIOError):
                            raise
                        continue
                return core
        return None


@cache
def _cores() -> Cores:
    """Return the cores that this process may use, which all processes of this user on the host share."""
    numbers = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else range(os.cpu_count() or 1)
    folder, numbers = Path(tempfile.gettempdir()) / f"hybridengine-cores-{os.getuid()}", numbers[: _quota()]
    try:
        return Cores(folder, numbers)
    except OSError:  # what has this name is not the user's folder: the cores are those of this process alone
        return Cores(Path(tempfile.mkdtemp(dir=os.getcwd())), numbers)


def _quota() -> int | None:
    """Return the number of cores whose time a container may use; None without such a limit."""
    try:
        time_us, period_us = QUOTA_FILE.read_text().split()
        return max(1, int(time_us) // int(period_us))
    except (OSError, ValueError):  # no cgroup of version 2, or "max"
        return None


os.register_at_fork(after_in_child=_cores.cache_clear)  # a child's locks would be its parent's


def core_of_this_host() -> contextlib.AbstractAsyncContextManager[None]:
    """Wait for a core of this host, and use it in the block."""
    return _cores().one()
