"""Entry point `verl.plugins`, loaded by every process that imports verl: a CPU platform and, on ranks, the engine.

verl chooses a platform when it is imported, and an engine for a value model before it imports `model.external_lib`.
Loading this module is cheap where neither is needed.

    VERL_ENGINE_VENDOR=hybridengine    this project's engines in place of verl's own
    VERL_PLATFORM=cpu                  ranks without GPUs; verl 0.9 has no such platform of its own
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from hybridengine.backends.vllm.environment import rank_environment
from hybridengine.errors import ConfigError

VENDOR = "hybridengine"
"""Value of VERL_ENGINE_VENDOR."""


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Ranks on the CPU, over gloo. Ray gets as many pretended GPUs as there are ranks, because verl asks for them."""

    device_name = "cpu"
    vendor_name = VENDOR
    device_module: Any = SimpleNamespace(  # what verl asks torch.cuda for
        empty_cache=lambda: None,
        synchronize=lambda device=None: None,
        is_available=lambda: True,
        set_device=lambda device: None,
        max_memory_allocated=lambda device=None: psutil.Process().memory_info().rss,
        max_memory_reserved=lambda device=None: psutil.Process().memory_info().rss,
        memory_allocated=lambda device=None: psutil.Process().memory_info().rss,
        memory_reserved=lambda device=None: psutil.Process().memory_info().rss,
        mem_get_info=lambda device=None: (psutil.virtual_memory().available, psutil.virtual_memory().total),
        get_device_name=lambda device=None: "cpu",
    )

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return False: nobody gets this platform without asking for it."""
        return False

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        if os.environ.get("VERL_ENGINE_VENDOR") != VENDOR:  # verl would build "cpu:gloo,cpu:gloo" next
            raise ConfigError(
                f"VERL_PLATFORM=cpu is for this engine; export VERL_ENGINE_VENDOR={VENDOR} as well"
            )
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


def prepare_process() -> None:
    """Prepare a process that imports verl; on a rank of this project's engine, register the engine."""
    on_cpu = os.environ.get("VERL_PLATFORM") == "cpu"
    if os.environ.get("VERL_ENGINE_VENDOR") != VENDOR:
        return
    os.environ.update(rank_environment(use_gpus=not on_cpu))
    if "RANK" not in os.environ:
        return
    if on_cpu:
        # verl would ask for the backend "cpu:gloo,cpu:gloo", which torch refuses.
        dist.init_process_group("gloo", init_method=os.environ.get("DIST_INIT_METHOD"))
    importlib.import_module("hybridengine.integrations.verl")


prepare_process()
