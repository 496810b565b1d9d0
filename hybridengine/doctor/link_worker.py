"""A worker for an examination: do all ranks add up what all have, and how fast?"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridengine.protocols import ONE_TO_ALL, RankContext, register

TIMES = 3


@dataclass(frozen=True)
class AllReduced:
    """What one rank saw."""

    right: bool
    """Every element is the sum over the ranks."""
    seconds: float
    """Of the fastest one."""
    device: str


class LinkWorker:
    """On every rank of a run's world; its collectives go where those of a run go."""

    def __init__(self, context: RankContext) -> None:
        self._rank, self._num_ranks = context.rank, context.world_size

    @register(ONE_TO_ALL)
    def all_reduce(self, num_bytes: int) -> AllReduced:
        """Sum a tensor over all ranks, as gradients are."""
        device = torch.device("cuda", torch.cuda.current_device()) if _has_gpu() else torch.device("cpu")
        expected = self._num_ranks * (self._num_ranks + 1) / 2
        right, best = True, float("inf")
        for _ in range(TIMES):
            tensor = torch.full((num_bytes // 4,), float(self._rank + 1), device=device)
            dist.barrier()
            _finish(device)
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            _finish(device)
            best = min(best, time.perf_counter() - begin)
            right = right and bool((tensor == expected).all())
        return AllReduced(right, best, str(device))


def _has_gpu() -> bool:
    return "nccl" in str(dist.get_backend_config()) and torch.cuda.is_available()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
