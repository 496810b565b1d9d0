"""Memory of this host's processes: what one holds, and what the system could still give."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

import psutil

GROUP = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
"""Limit and use of a container: version 2 of control groups."""


def held_bytes() -> dict[str, int]:
    """Return what this process holds now: `resident_bytes` in the host's memory, `device_bytes` of tensors on its GPU.

    Leaves out a GPU that is not in use. Takes microseconds, and does not import torch.
    """
    held = {"resident_bytes": psutil.Process().memory_info().rss}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        held["device_bytes"] = torch.cuda.memory_allocated()
    return held


def trim_heap() -> None:
    """Give all that the C heap has free back to the system."""
    with contextlib.suppress(OSError, AttributeError):  # other libraries than glibc free large blocks at once
        ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int:
    """Return what the system, or the container that this process is in, could give without swapping."""
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int(file.read_text()) for file in GROUP)
        available = min(available, max(0, limit - used))
    return available
