"""What a machine's ranks can do: matrices, memory, links; by one rank alone, and by all of them at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.protocols import ONE_TO_ALL, RankContext, register
from hybridengine.topology.sizes import TrainSizes

MEBIBYTE = 2**20
MATRIX = 1024
COPIED_BYTES = 64 * MEBIBYTE
SENT_BYTES = 16 * MEBIBYTE
MEASURED_S = 0.3
"""How long each figure is measured, at least."""
EMPTY_CALLS = 50
OWN_DEVICES_SHARE = 0.75
"""Ranks that together do so much of what they do alone have devices of their own."""


@dataclass(frozen=True)
class MachineRates:
    """Figures of a machine with so many ranks. Rates are of one rank while the others wait, unless it is said."""

    num_ranks: int
    flops_per_s: dict[str, float]
    """By type; a product and its sum are two."""
    devices_at_once: int | None
    """Ranks that can work at the same time; None where all can."""
    memory_bytes_per_s: float
    """Read and written in a copy."""
    memory_node_bytes_per_s: float
    """Of all ranks together."""
    link_bytes_per_s: float
    link_node_bytes_per_s: float
    """Of all pairs of neighbours together, in each direction."""
    link_latency_s: float
    """Half of the way there and back of a small message."""
    call_s: float
    """Of an empty call to all ranks."""


class MachineWorker:
    """Measures on one rank; every method is called on all ranks, of which some only wait."""

    def __init__(self, context: RankContext) -> None:
        self._rank, self._world_size = context.rank, context.world_size
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        )

    @register(ONE_TO_ALL)
    def answer(self) -> None:
        """Nothing: an empty call."""

    @register(ONE_TO_ALL)
    def multiply(self, dtype: str, num_working: int) -> float:
        """Operations per second of square matrices; 0 on ranks that wait."""
        one, other = (
            torch.randn(MATRIX, MATRIX, dtype=getattr(torch, dtype), device=self._device) for _ in range(2)
        )
        return self._rate(num_working, 2 * MATRIX**3, lambda: torch.mm(one, other))

    @register(ONE_TO_ALL)
    def copy(self, num_working: int) -> float:
        """Bytes read and written per second in memory that is there."""
        source, target = (torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2))
        return self._rate(num_working, 2 * COPIED_BYTES, lambda: target.copy_(source))

    @register(ONE_TO_ALL)
    def send(self, num_bytes: int, num_pairs: int) -> float:
        """Seconds of a message to a neighbour and one back: ranks 0 and 1, 2 and 3, ...; 0 on ranks that wait."""
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        neighbour = self._rank ^ 1
        dist.barrier()
        if self._rank // 2 >= num_pairs or neighbour >= self._world_size:
            dist.barrier()
            return 0.0
        count, begin = 0, 0.0
        # Both sides must know when to end: a fixed number, after one that warms up.
        repetitions = 4 if num_bytes > MEBIBYTE else 50
        for count in range(repetitions + 1):
            if count == 1:
                begin = time.perf_counter()
            if self._rank < neighbour:
                dist.send(message, neighbour)
                dist.recv(message, neighbour)
            else:
                dist.recv(message, neighbour)
                dist.send(message, neighbour)
        self._synchronise()
        seconds = (time.perf_counter() - begin) / count
        dist.barrier()
        return seconds

    def _rate(self, num_working: int, amount: float, work: Callable[[], object]) -> float:
        dist.barrier()
        rate = 0.0
        if self._rank < num_working:
            work()
            self._synchronise()
            count, begin = 0, time.perf_counter()
            while (seconds := time.perf_counter() - begin) < MEASURED_S or not count:
                work()
                self._synchronise()
                count += 1
            rate = count * amount / seconds
        dist.barrier()
        return rate

    def _synchronise(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize()


def measure_machine(pool: ResourcePool, num_ranks: int, dtypes: tuple[str, ...]) -> MachineRates:
    """Figures of the machine that a pool's ranks are on."""
    group = WorkerGroup(
        pool, "hybridengine.bench.machine_rates.MachineWorker", parallel=TrainSizes(1, 1, num_ranks)
    )

    def rates(method: str, *arguments: object) -> tuple[float, float]:
        """Of one rank alone, and of all together."""
        alone, together = (
            sum(getattr(group, method)(*arguments, num_working).get()) for num_working in (1, num_ranks)
        )
        return alone, together

    flops = {dtype: rates("multiply", dtype) for dtype in dtypes}
    alone, together = flops[dtypes[0]]
    shares = together < OWN_DEVICES_SHARE * num_ranks * alone
    memory, memory_node = rates("copy")
    begin = time.perf_counter()
    for _ in range(EMPTY_CALLS):
        group.answer().get()
    call_s = (time.perf_counter() - begin) / EMPTY_CALLS
    link = link_node = memory
    latency = 1e-6
    if num_ranks > 1:
        pairs = num_ranks // 2
        link = 2 * SENT_BYTES / max(group.send(SENT_BYTES, 1).get())
        link_node = 2 * SENT_BYTES * pairs / max(group.send(SENT_BYTES, pairs).get())
        latency = max(group.send(8, 1).get()) / 2
    return MachineRates(
        num_ranks,
        {dtype: found[0] for dtype, found in flops.items()},
        max(1, round(together / alone)) if shares else None,
        memory,
        memory_node,
        link,
        link_node,
        latency,
        call_s,
    )
