"""Start a check in processes of its own on the GPU: each begins with an empty device, and vLLM's groups are made
once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any
from unittest import mock

import torch

from hybridengine.backends.vllm.environment import rank_environment
from tests.gloo.ranks import ENVIRONMENT, RankLauncher


class DeviceLauncher(RankLauncher):
    """Runs module-level functions on new processes: a fork could not use CUDA. Without a GPU they run on the CPU."""

    def __init__(self) -> None:
        self._context: Any = multiprocessing.get_context("spawn")

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 240.0,
        may_die: Collection[int] = (),
        backend: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Return the result of `function(rank, *args)` of every rank, as `RankLauncher` does.

        Args:
            backend: by default that of a run: NCCL for tensors on the GPU.
            environment: further variables, set before anything is imported.
        """
        has_gpu = torch.cuda.is_available()
        backend = backend or ("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
        variables = rank_environment(use_gpus=has_gpu) | ENVIRONMENT | dict(environment or {})
        with mock.patch.dict(os.environ, variables):
            return super().__call__(
                world_size, function, *args, timeout_s=timeout_s, may_die=may_die, backend=backend
            )
