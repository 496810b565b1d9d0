"""What a worker is told about its place when it is made. No Ray here: workers are plain classes."""

from __future__ import annotations

from dataclasses import dataclass

from hybridengine.protocols import GroupTopology
from hybridengine.topology.grid import Coordinate


@dataclass(frozen=True)
class RankContext:
    """Place of one worker; the first argument of every worker's constructor: ``Worker(context, **config)``."""

    role: str
    """Name of the worker group, e.g. "actor"."""
    rank: int
    """Rank in the pool, which is the rank in torch.distributed's world."""
    world_size: int
    topology: GroupTopology
    """Arrangement of the group's ranks."""
    coordinate: Coordinate
    """Training coordinate of this rank in that arrangement."""
    node: str
    """Address of the machine."""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} ({self.coordinate}, node {self.node})"
