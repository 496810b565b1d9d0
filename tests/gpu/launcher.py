"""Start the processes of a check on the GPU."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch

from hybridengine.backends.vllm.environment import rank_environment
from tests.gloo.ranks import ENVIRONMENT, RankLauncher


class DeviceLauncher(RankLauncher):
    """Runs module-level functions in new processes, because a fork cannot use CUDA; without a GPU they use the CPU.

    Each check begins with an empty device, and vLLM creates its groups only once in a process.
    """

    def __init__(self) -> None:
        self._context: Any = multiprocessing.get_context("spawn")

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        backend: str = "",
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Return the result of `function(rank, *args)` of every rank, as `RankLauncher` does with the same `options`.

        Args:
            backend: by default that of a run: NCCL for tensors on the GPU.
            environment: further variables, set before anything is imported.
        """
        has_gpu = torch.cuda.is_available()
        backend = backend or ("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
        variables = rank_environment(use_gpus=has_gpu) | ENVIRONMENT | dict(environment or {})
        with mock.patch.dict(os.environ, variables):
            return super().__call__(world_size, function, *args, backend=backend, **options)
