"""Memory that this process holds, and memory that the host still has available."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

import psutil

GROUP = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
"""Files with the memory limit and usage of a container (cgroup v2)."""


def held_bytes() -> dict[str, int]:
    """Return the memory of this process: `resident_bytes` on the host, `device_bytes` of tensors on its GPU.

    `device_bytes` is omitted if no GPU is in use. Takes microseconds and does not import torch.
    """
    held = {"resident_bytes": psutil.Process().memory_info().rss}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        held["device_bytes"] = torch.cuda.memory_allocated()
    return held


def trim_heap() -> None:
    """Return the free memory of the C heap to the system."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries free large blocks at once
        ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int:
    """Return the bytes available on this system, or in this container, without swapping."""
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int(file.read_text()) for file in GROUP)
        available = min(available, max(0, limit - used))
    return available
