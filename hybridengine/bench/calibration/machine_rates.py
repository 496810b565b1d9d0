"""Measured rates of matrix products, memory and links, by one rank alone and by all ranks at once."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from hybridengine.backends.vllm.environment import rank_environment
from hybridengine.bench.calibration.cases import GPU_SCALE
from hybridengine.controller.cluster import start_ray
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.rows.protocols import ONE_TO_ALL, RankContext, register
from hybridengine.topology.sizes import TrainSizes

MEBIBYTE = 2**20
MATRIX = 512
"""Rows and columns of the matrices that are multiplied on a CPU; `GPU_SCALE` times as many on a GPU."""
COPIED_BYTES = 64 * MEBIBYTE
SENT_BYTES = 16 * MEBIBYTE
MEASURED_S = 0.3
"""Least seconds for which each rate is measured."""
EMPTY_CALLS = 50
COPY_LATENCY_S = 10e-6
OWN_DEVICES_SHARE = 0.75
"""Ranks have separate devices if together they reach at least this share of the sum of their single rates."""


class MachineWorker:
    """Worker that measures rates on one rank; methods are called on all ranks, some of which only wait."""

    def __init__(self, context: RankContext) -> None:
        self._rank, self._world_size = context.rank, context.world_size
        self._device = "cuda" if torch.cuda.is_available() else None

    @register(ONE_TO_ALL)
    def answer(self) -> None:
        """Do nothing; serves as an empty call."""

    @register(ONE_TO_ALL)
    def multiply(self, dtype: str, num_working: int) -> float:
        """Return the operations per second of a square matrix product, a multiply-add being two; 0 on waiting ranks."""
        size = MATRIX * (1 if self._device is None else GPU_SCALE)
        one, other = torch.randn(2, size, size, dtype=getattr(torch, dtype), device=self._device)
        return self._rate(num_working, 2 * size**3, lambda: torch.mm(one, other))

    @register(ONE_TO_ALL)
    def copy(self, num_working: int) -> float:
        """Return the bytes read and written per second in allocated memory; 0 on waiting ranks."""
        source, target = (torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2))
        return self._rate(num_working, 2 * COPIED_BYTES, lambda: target.copy_(source))

    @register(ONE_TO_ALL)
    def send(self, num_bytes: int, num_pairs: int) -> float:
        """Return the round-trip seconds of a message between neighbours (0 and 1, 2 and 3, ...); 0 on waiting ranks."""
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        neighbour = self._rank ^ 1
        dist.barrier()
        if self._rank // 2 >= num_pairs or neighbour >= self._world_size:
            dist.barrier()
            return 0.0
        # A fixed number of repetitions, so that both sides agree on the end; the first one warms up.
        repetitions, begin = 4 if num_bytes > MEBIBYTE else 50, 0.0
        hops = (dist.send, dist.recv) if self._rank < neighbour else (dist.recv, dist.send)
        for number in range(repetitions + 1):
            if number == 1:
                begin = time.perf_counter()
            for hop in hops:
                hop(message, neighbour)
        if self._device is not None:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / repetitions
        dist.barrier()
        return seconds

    def _rate(self, num_working: int, amount: float, work: Callable[[], object]) -> float:
        dist.barrier()
        rate = 0.0
        if self._rank < num_working:
            timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
            rate = amount / timer.blocked_autorange(min_run_time=MEASURED_S).mean
        dist.barrier()
        return rate


def measured_cluster(num_ranks: int, on_gpus: bool) -> Cluster:
    """Return this machine as a cluster with measured rates and unfitted coefficients."""
    start_ray(num_cpus=num_ranks)
    with ResourcePool([num_ranks], use_gpus=on_gpus, env=rank_environment(use_gpus=on_gpus)) as pool:
        rates = measured_rates(
            WorkerGroup(pool, MachineWorker, parallel=TrainSizes(1, 1, num_ranks)), on_gpus
        )
    host_bytes = psutil.virtual_memory().total
    memory = torch.cuda.get_device_properties(0).total_memory if on_gpus else host_bytes // num_ranks
    machine = f"{num_ranks} GPUs" if on_gpus else f"{os.cpu_count()} cores of {platform.machine()}"
    return Cluster.model_validate(
        {
            "name": f"{machine}, {num_ranks} ranks",
            "source": f"Measured by hybridengine calibrate with {num_ranks} ranks on {machine}.",
            "nodes": 1,
            "devices_per_node": num_ranks,
            "device_memory_bytes": memory,
            **rates,
        }
    )


def measured_rates(group: Any, on_gpus: bool) -> dict[str, Any]:
    """Return the sections `links` and `compute` of a cluster file, measured by a group of `MachineWorker`."""
    num_ranks = group.num_ranks

    def rates(method: str, *arguments: object) -> tuple[float, float]:
        """Return the rate of one rank while the others wait, and the sum over all ranks at once."""
        call = getattr(group, method)
        return sum(call(*arguments, 1).get()), sum(call(*arguments, num_ranks).get())

    flops = {dtype: rates("multiply", dtype) for dtype in ("float32", "bfloat16")}
    alone, together = flops["bfloat16" if on_gpus else "float32"]
    shared = together < OWN_DEVICES_SHARE * num_ranks * alone

    def link(alone: float, together: float, latency_s: float) -> dict[str, float | None]:
        node = max(alone, together) if shared else None
        return {"bytes_per_s": alone, "node_bytes_per_s": node, "latency_s": latency_s}

    memory = rates("copy")
    neighbours = link(*memory, 1e-6)
    if num_ranks > 1:
        pairs = num_ranks // 2
        one, all_pairs = (2 * SENT_BYTES * num / max(group.send(SENT_BYTES, num).get()) for num in (1, pairs))
        neighbours = link(one, all_pairs, max(group.send(8, 1).get()) / 2)
    begin = time.perf_counter()
    for _ in range(EMPTY_CALLS):
        group.answer().get()
    return {
        "links": {
            "same_device": link(*memory, COPY_LATENCY_S),
            "same_node": neighbours,
            "host": {"bytes_per_s": memory[0], "latency_s": COPY_LATENCY_S},
        },
        "compute": {
            "flops_per_s": {dtype: rate for dtype, (rate, _) in flops.items()},
            "devices_at_once": max(1, round(together / alone)) if shared else None,
            "call_s": (time.perf_counter() - begin) / EMPTY_CALLS,
            "kv_block_tokens": 16 if on_gpus else 128,
        },
    }
