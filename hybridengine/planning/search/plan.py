"""Plan of a run: pools of ranks, models and their sizes, and the time and memory of an iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.passes import compute_of
from hybridengine.planning.search.iteration import Bar, Schedule, phases
from hybridengine.planning.search.option import Option
from hybridengine.planning.search.placements import Placement


@dataclass(frozen=True)
class PoolPlan:
    """Pool of ranks, with the sizes of its models."""

    num_ranks: int
    options: tuple[Option, ...]
    process_bytes: int
    """Bytes of a rank's process without models."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache on a rank; 0 if the actor is in another pool."""
        return sum(option.engine.kv_bytes for option in self.options if option.engine)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on any rank, including its process."""
        idle = sum(option.memory.idle for option in self.options)
        generating = sum(option.memory.generating for option in self.options)
        peaks = [0, *(idle + option.extra_bytes for option in self.options)]
        peaks += [
            generating + option.engine.gen_bytes + option.engine.kv_bytes
            for option in self.options
            if option.engine
        ]
        return max(peaks) + self.process_bytes


@dataclass(frozen=True)
class Plan:
    """Placement, ranks and sizes of all models, and the resulting iteration."""

    placement: Placement
    pools: tuple[PoolPlan, ...]
    bars: tuple[Bar, ...]
    device_bytes: int

    @classmethod
    def of(
        cls,
        placement: Placement,
        options: Sequence[Sequence[Option]],
        num_ranks: Sequence[int],
        schedule: Schedule,
        cluster: Cluster,
    ) -> Plan:
        """Return the plan with the given options for the models of each pool, whether they fit or not."""
        process_bytes = compute_of(cluster).process_bytes or 0
        pools = tuple(
            PoolPlan(ranks, tuple(own), process_bytes) for ranks, own in zip(num_ranks, options, strict=True)
        )
        bars = schedule.bars({option.model: option.least_seconds for own in options for option in own})
        return cls(placement, pools, tuple(bars), cluster.device_memory_bytes)

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
        """Free bytes on the fullest rank."""
        return self.device_bytes - max(pool.peak_bytes for pool in self.pools)

    def option(self, model: str) -> Option:
        """Return the option of a model."""
        return next(option for pool in self.pools for option in pool.options if option.model == model)
