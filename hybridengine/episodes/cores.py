"""Cores of this host, one for each process of a tool at a time: time limits then do not depend on how many tools run."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
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
"""Mean time between two looks for a core that another process has freed."""


class Cores:
    """Cores, each with a file in `folder` that a process locks while it uses the core; those that wait for one share the
    lock of another file.

    The system frees the locks of a process that ends.
    """

    def __init__(self, folder: Path, numbers: Iterable[int]) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._waiting, *unused = (
            os.open(folder / str(name), os.O_CREAT | os.O_RDWR, 0o600) for name in ("waiting", *numbers)
        )
        self._unused = deque(unused)
        self._queues = WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue]()
        self._looking = set[_Queue]()
        """Queues of event loops, in threads, that look for a core of another process or loop."""

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a core and use it in the block; of an event loop's waiters, the first has the first one.

        Where other processes or event loops wait as well, each looks equally often, and then takes cores for those that
        wait in it: one that frees a core and wants it again would otherwise always be there first.
        """
        queue = self._queues.setdefault(asyncio.get_running_loop(), _Queue())
        async with queue.turn():
            try:
                may_take = queue.num_served > 0 or (
                    not self._looking and _locked(self._waiting, fcntl.LOCK_EX)
                )
                core = self._taken() if may_take else None
                left = 0 if core is None else queue.num_served - 1
                queue.num_served = max(0, min(left, queue.num_waiting))
                while core is None:
                    self._looking.add(queue)
                    _locked(self._waiting, fcntl.LOCK_SH)
                    # At random: looks at equal intervals would always follow those of the same process.
                    await asyncio.sleep(random.uniform(0, 2 * LOOK_S))
                    if (core := self._taken()) is not None:
                        queue.num_served = queue.num_waiting
            finally:
                self._looking.discard(queue)
                if not self._looking:
                    _unlock(self._waiting)
        try:
            yield
        finally:
            _unlock(core)
            self._unused.append(core)

    def _taken(self) -> int | None:
        """Take a core that no process uses; None if there is none. Threads may call it at once."""
        for _ in range(len(self._unused)):
            with contextlib.suppress(IndexError):
                core, is_taken = self._unused.popleft(), False
                try:
                    is_taken = _locked(core, fcntl.LOCK_EX)
                finally:
                    if not is_taken:
                        self._unused.append(core)
                if is_taken:
                    return core
        return None


class _Queue:
    """Those of an event loop that wait for a core."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_served = 0
        """How many of them may take cores that are free without waiting for the loop's next look."""
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the others, and be the one that looks in the block."""
        self.num_waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self.num_waiting -= 1
        try:
            yield
        finally:
            self._lock.release()


def _locked(file: int, kind: int) -> bool:
    """Lock an open file; return False if another process's lock is in the way.

    Without locks (`NO_LOCKS`), the cores are those of this process alone.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _unlock(file: int) -> None:
    with contextlib.suppress(OSError):  # of a file system without locks
        fcntl.flock(file, fcntl.LOCK_UN)


@cache
def _cores() -> Cores:
    """Return the cores that this process may use, which all processes of this user on the host share."""
    numbers = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else range(os.cpu_count() or 1)
    folder, numbers = Path(tempfile.gettempdir()) / f"hybridengine-cores-{os.getuid()}", numbers[: _quota()]
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid == os.getuid():
            return Cores(folder, numbers)
    # What has this name is not the user's folder: the cores are those of this process alone.
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
