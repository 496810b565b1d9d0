"""Resources of the machine that runs a benchmark."""

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
"""Approximate memory of a rank's process without weights or rows."""


def num_gpus(devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs of this machine, 0 if they are hidden, without calling the driver."""
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    return sum(1 for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())


def check_memory(what: str, needed_bytes: int, remedy: str) -> None:
    """Check that this machine, or this container, has enough host memory for a benchmark.

    Raises:
        ConfigError: less than `needed_bytes` is available.
    """
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
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "megatron-core")},
    }
