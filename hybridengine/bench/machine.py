"""The machine of a benchmark: what it has, and whether a benchmark fits."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hybridengine.errors import ConfigError
from hybridengine.formatting import format_bytes
from hybridengine.host_memory import available_bytes

PROCESS_BYTES = 450 * 2**20
"""Memory of a rank's process by itself, roughly."""


def num_gpus(devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs of this machine, 0 where they are hidden; asks no driver."""
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    return sum(1 for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())


def check_memory(what: str, needed_bytes: int, remedy: str) -> None:
    """Check that this machine, or this container, can hold what a benchmark needs in the host's memory.

    Raises:
        ConfigError: it cannot.
    """
    available = available_bytes()
    if needed_bytes > available:
        raise ConfigError(
            f"{what} takes about {format_bytes(needed_bytes)}, this machine has {format_bytes(available)} available;"
            f" {remedy}"
        )


def machine_figures() -> dict[str, Any]:
    """Return what the JSON of a benchmark says of the machine."""
    return {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "megatron-core")},
    }
