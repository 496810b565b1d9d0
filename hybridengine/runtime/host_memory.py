"""Memory of this host's processes: what one holds, and what the system could still give."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")
GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""Limit and use of a container, version 2 and version 1 of control groups."""


def held_bytes() -> dict[str, int]:
    """What this process holds now: `resident_bytes` in the host's memory, and `device_bytes` of tensors on its GPU.

    Leaves out what the system does not say, and a GPU that is not in use. Takes microseconds, and imports nothing.
    """
    held = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        held["resident_bytes"] = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        held["device_bytes"] = torch.cuda.memory_allocated()
    return held


def trim_heap() -> None:
    """Give all that the C heap has free back to the system."""
    with contextlib.suppress(OSError, AttributeError):  # other libraries than glibc free large blocks at once
        ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int:
    """What the system, or the container that this process is in, could give without swapping; 0 where nobody says."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        (line,) = (line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    for limit, used in GROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(max(0, int(limit.read_text()) - int(used.read_text())))
    return min(found, default=0)
