"""A plan: the pools of ranks, the models on them and their sizes, and the time and memory of an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridengine.planning.iteration import Bar, phases
from hybridengine.planning.option import Option
from hybridengine.planning.placements import Placement


@dataclass(frozen=True)
class PoolPlan:
    """A pool of ranks and its models' sizes."""

    num_ranks: int
    options: tuple[Option, ...]
    kv_bytes: int
    """KV cache of a rank; 0 where the actor is elsewhere."""
    peak_bytes: int
    """Memory of the rank with the most at any time, processes included."""


@dataclass(frozen=True)
class Plan:
    """Where everything goes, and what follows."""

    placement: Placement
    pools: tuple[PoolPlan, ...]
    bars: tuple[Bar, ...]
    device_bytes: int

    @cached_property
    def step_s(self) -> float:
        return max(bar.end_s for bar in self.bars)

    @property
    def phases_s(self) -> Mapping[str, float]:
        return phases(self.bars)

    @property
    def num_ranks(self) -> int:
        return sum(pool.num_ranks for pool in self.pools)

    @property
    def headroom_bytes(self) -> int:
        """Memory that the fullest rank has left."""
        return self.device_bytes - max(pool.peak_bytes for pool in self.pools)

    def option(self, model: str) -> Option:
        """A model's sizes."""
        return next(option for pool in self.pools for option in pool.options if option.model == model)
