"""Generation groups over a training grid: which ranks form an engine, and among which weights move.

Engines of p_g·t_g ranks share out all p·t·d ranks. Two grouping methods (HybridFlow, arXiv 2409.19256, section 5.3 and
figure 8, for sizes that nest; the rest is this project's):

    INTERVAL, p_g | p and t_g | t    gen tp = floor(tp · t_g / t), gen pp = floor(pp · p_g / p): every rank's training
                                     shard is part of the generation shard that it needs, so no byte is held twice
    INTERVAL, p_g | p and t | t_g    an engine spans ranks with the same training shard, which they share out: of each
                                     rank's generation shard, the part in its own stages is in its training shard
    INTERVAL, other sizes, VANILLA   consecutive ranks form an engine, as for training; shards need not overlap

A micro-DP group is the ranks of one training replica that hold the same generation shard. Where shards nest it is the
domain of the weight gather.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from hybridengine.errors import TopologyError, raise_all
from hybridengine.topology.grid import Grid, Groups, group_by
from hybridengine.topology.sizes import GenSizes


class Grouping(str, Enum):
    """How ranks form generation engines."""

    INTERVAL = "interval"
    VANILLA = "vanilla"


@dataclass(frozen=True, order=True)
class GenCoordinate:
    """Place of a rank in the generation layout."""

    replica_rank: int
    """Which engine, 0 to p·t·d / (p_g·t_g) - 1."""
    pp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"replica={self.replica_rank} gen_pp={self.pp_rank} gen_tp={self.tp_rank}"


@dataclass(frozen=True)
class GenerationGrid:
    """(p_g, t_g) laid over the ranks of a training grid.

    Raises:
        TopologyError: p_g·t_g does not divide the number of ranks.
    """

    train: Grid
    sizes: GenSizes
    grouping: Grouping = Grouping.INTERVAL

    def __post_init__(self) -> None:
        raise_all(self.sizes.problems_over(self.train.sizes), TopologyError)

    @property
    def micro_dp_size(self) -> int:
        """d_g: generation replicas inside one training replica.

        Raises:
            TopologyError: the sizes do not nest.
        """
        return self.sizes.micro_dp_size(self.train.sizes)

    @property
    def num_replicas(self) -> int:
        """Engines that generate at the same time; d · d_g where the sizes nest."""
        return self.train.num_ranks // self.sizes.num_ranks

    @cached_property
    def nests(self) -> bool:
        """Whether every rank's training shard is part of its generation shard, so that the way back is local."""
        train, gen = self.train.sizes, self.sizes
        return self.sizes.nests_in(train) and all(
            (place.pp_rank * gen.pp_size // train.pp_size, place.tp_rank * gen.tp_size // train.tp_size)
            == (own.pp_rank, own.tp_rank)
            for place, own in zip(self.train.coordinates(), self._coordinates, strict=True)
        )

    @property
    def _is_consecutive(self) -> bool:
        """Whether engines are consecutive positions of the training grid."""
        train, gen = self.train.sizes, self.sizes
        return (
            self.grouping is Grouping.VANILLA
            or train.pp_size % gen.pp_size != 0
            or (train.tp_size % gen.tp_size != 0 and gen.tp_size % train.tp_size != 0)
        )

    def _position(self, rank: int) -> int:
        """Index of a rank in the order dp, pp, tp, slowest first, whatever the grid's rank order is."""
        place, train = self.train.coordinate(rank), self.train.sizes
        return (place.dp_rank * train.pp_size + place.pp_rank) * train.tp_size + place.tp_rank

    def coordinate(self, rank: int) -> GenCoordinate:
        """Generation coordinate of a global rank.

        Raises:
            TopologyError: the rank is outside of the grid.
        """
        self.train.coordinate(rank)  # raises for a rank that does not exist
        return self._coordinates[rank]

    def _place(self, rank: int) -> GenCoordinate:
        place, train, gen = self.train.coordinate(rank), self.train.sizes, self.sizes
        if self._is_consecutive:
            replica_rank, inside = divmod(self._position(rank), gen.num_ranks)
            return GenCoordinate(replica_rank, inside // gen.tp_size, inside % gen.tp_size)
        stages = train.pp_size // gen.pp_size
        pp_rank, micro_pp = divmod(place.pp_rank, stages)
        slot = place.dp_rank * stages + micro_pp  # among the ranks of this generation stage and training tp
        if train.tp_size % gen.tp_size == 0:
            shards = train.tp_size // gen.tp_size
            return GenCoordinate(slot * shards + place.tp_rank % shards, pp_rank, place.tp_rank // shards)
        parts = gen.tp_size // train.tp_size
        return GenCoordinate(slot // parts, pp_rank, place.tp_rank * parts + slot % parts)

    @cached_property
    def _coordinates(self) -> tuple[GenCoordinate, ...]:
        return tuple(map(self._place, range(self.train.num_ranks)))

    def _groups(self, *fixed: str, along: str) -> Groups:
        """Groups of ranks that agree in the generation axes `fixed`, each in the order of the axis `along`."""

        def coordinates(rank: int, *axes: str) -> tuple[int, ...]:
            return tuple(getattr(self._coordinates[rank], f"{axis}_rank") for axis in axes)

        groups = group_by(range(self.train.num_ranks), lambda rank: coordinates(rank, *fixed))
        return tuple(tuple(sorted(group, key=lambda rank: coordinates(rank, along))) for group in groups)

    @cached_property
    def tp_groups(self) -> Groups:
        """Tensor-parallel groups of the engines, each in the order of generation tp.

        Not always the order of ranks: an engine that shares out a training shard has gen tp 0 and 1 on tp 0.
        """
        return self._groups("replica", "pp", along="tp")

    @cached_property
    def pp_groups(self) -> Groups:
        """Pipeline-parallel groups of the engines, each in the order of generation pp."""
        return self._groups("replica", "tp", along="pp")

    @cached_property
    def engine_groups(self) -> Groups:
        """Ranks of each engine."""
        return group_by(range(self.train.num_ranks), lambda rank: self._coordinates[rank].replica_rank)

    @cached_property
    def micro_dp_groups(self) -> Groups:
        """Ranks of one training replica that hold the same generation shard."""

        def key(rank: int) -> tuple[int, int, int]:
            own = self._coordinates[rank]
            return self.train.coordinate(rank).dp_rank, own.pp_rank, own.tp_rank

        return group_by(range(self.train.num_ranks), key)

    @cached_property
    def domains(self) -> Groups:
        """Ranks among which weights move so that each can fill its generation shard.

        Where shards nest, the micro-DP groups. Where an engine spans ranks with the same training shard, the ranks of
        a replica with that shard's tp and one generation stage. Otherwise the fewest whole engines that are whole
        training replicas as well.
        """
        if self.nests:
            return self.micro_dp_groups
        ranks = range(self.train.num_ranks)
        if self._is_consecutive:
            block = math.lcm(self.train.sizes.model_parallel_size, self.sizes.num_ranks)
            return group_by(ranks, lambda rank: self._position(rank) // block)

        def key(rank: int) -> tuple[int, int, int]:
            place = self.train.coordinate(rank)
            return place.dp_rank, self._coordinates[rank].pp_rank, place.tp_rank

        return group_by(ranks, key)
