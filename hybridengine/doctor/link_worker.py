"""Worker that measures an all-reduce over the ranks of a cluster."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hybridengine.rows.protocols import ONE_TO_ALL, RankContext, register

TIMES = 3


class LinkWorker:
    """Worker on every rank of a world as in a run; its collectives use the same links."""

    def __init__(self, context: RankContext) -> None:
        self._rank, self._num_ranks = context.rank, context.world_size

    @register(ONE_TO_ALL)
    def all_reduce(self, num_bytes: int) -> float | None:
        """Sum a tensor over all ranks, like gradients; return the shortest time, None if an element is wrong."""
        on_gpu = "nccl" in str(dist.get_backend_config()) and torch.cuda.is_available()
        expected = self._num_ranks * (self._num_ranks + 1) / 2
        right, best = True, float("inf")
        for _ in range(TIMES):
            value = float(self._rank + 1)
            tensor = torch.full((num_bytes // 4,), value, device="cuda" if on_gpu else "cpu")
            dist.barrier()
            if on_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            if on_gpu:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begin)
            right = right and bool((tensor == expected).all())
        return best if right else None
