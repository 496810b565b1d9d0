"""Generation groups inside a training grid: which ranks form an engine, and which gather weights together.

Two grouping methods (HybridFlow, arXiv 2409.19256, section 5.3 and figure 8):

    INTERVAL   gen tp = floor(tp · t_g / t), gen pp = floor(pp · p_g / p): every rank's training shard is part of the
               generation shard that it needs, so that no byte is held twice
    VANILLA    consecutive ranks of a replica form an engine, as for training; shards need not overlap

A micro-DP group is the d_g ranks of one training replica that hold the same generation shard. With interval grouping
it is the domain of the weight gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from hybridengine.topology.grid import Grid, Groups, group_by
from hybridengine.topology.sizes import GenSizes


class Grouping(str, Enum):
    """How the ranks of a training replica form generation engines."""

    INTERVAL = "interval"
    VANILLA = "vanilla"


@dataclass(frozen=True, order=True)
class GenCoordinate:
    """Place of a rank in the generation layout."""

    dp_rank: int
    """Training replica."""
    micro_dp_rank: int
    """Generation replica inside the training replica, 0 to d_g - 1."""
    pp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"dp={self.dp_rank} micro_dp={self.micro_dp_rank} gen_pp={self.pp_rank} gen_tp={self.tp_rank}"


@dataclass(frozen=True)
class GenerationGrid:
    """(p_g, t_g) laid over the ranks of a training grid.

    Raises:
        TopologyError: p_g does not divide p, or t_g does not divide t.
    """

    train: Grid
    sizes: GenSizes
    grouping: Grouping = Grouping.INTERVAL

    def __post_init__(self) -> None:
        self.sizes.micro_dp_size(self.train.sizes)

    @property
    def micro_dp_size(self) -> int:
        """d_g: generation replicas inside one training replica."""
        return self.sizes.micro_dp_size(self.train.sizes)

    @property
    def num_replicas(self) -> int:
        """d · d_g: engines that generate at the same time."""
        return self.train.sizes.dp_size * self.micro_dp_size

    def coordinate(self, rank: int) -> GenCoordinate:
        """Generation coordinate of a global rank."""
        place, train, gen = self.train.coordinate(rank), self.train.sizes, self.sizes
        if self.grouping is Grouping.INTERVAL:
            stages, shards = train.pp_size // gen.pp_size, train.tp_size // gen.tp_size
            micro_pp, micro_tp = place.pp_rank % stages, place.tp_rank % shards
            return GenCoordinate(
                place.dp_rank,
                micro_pp * shards + micro_tp,
                place.pp_rank // stages,
                place.tp_rank // shards,
            )
        inside = place.pp_rank * train.tp_size + place.tp_rank
        micro_dp, inside = divmod(inside, gen.num_ranks)
        return GenCoordinate(place.dp_rank, micro_dp, inside // gen.tp_size, inside % gen.tp_size)

    @cached_property
    def _coordinates(self) -> tuple[GenCoordinate, ...]:
        return tuple(self.coordinate(rank) for rank in range(self.train.num_ranks))

    def _groups(self, *fixed: str) -> Groups:
        def key(rank: int) -> tuple[int, ...]:
            return tuple(getattr(self._coordinates[rank], field) for field in fixed)

        return group_by(range(self.train.num_ranks), key)

    @cached_property
    def tp_groups(self) -> Groups:
        """Tensor-parallel groups of the engines."""
        return self._groups("dp_rank", "micro_dp_rank", "pp_rank")

    @cached_property
    def pp_groups(self) -> Groups:
        """Pipeline-parallel groups of the engines."""
        return self._groups("dp_rank", "micro_dp_rank", "tp_rank")

    @cached_property
    def engine_groups(self) -> Groups:
        """Ranks of each engine."""
        return self._groups("dp_rank", "micro_dp_rank")

    @cached_property
    def micro_dp_groups(self) -> Groups:
        """Ranks of one training replica that hold the same generation shard."""
        return self._groups("dp_rank", "pp_rank", "tp_rank")

    def replica_index(self, rank: int) -> int:
        """Which of the d · d_g engines `rank` belongs to."""
        place = self.coordinate(rank)
        return place.dp_rank * self.micro_dp_size + place.micro_dp_rank
