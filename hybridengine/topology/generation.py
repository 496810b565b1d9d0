"""Generation engines laid out over a training grid: the ranks of each engine, and the ranks that hold the same weights.

Engines of p_g·t_g ranks divide the p·t·d ranks among them. There are two grouping methods (HybridFlow, arXiv
2409.19256, section 5.3 and figure 8, for sizes that nest; the other sizes are this project's):

    INTERVAL, p_g | p and t_g | t    gen tp = floor(tp · t_g / t), gen pp = floor(pp · p_g / p): every rank's training
                                     shard is part of the generation shard that it needs, so no byte is held twice
    INTERVAL, p_g | p and t | t_g    an engine spans ranks with the same training shard and divides it among them: the
                                     part of a rank's generation shard in its own stages is in its training shard
    INTERVAL, e_g = t_g and t_g | e  gen tp = floor(ep · t_g / e) of experts that training does not shard (etp = 1): they
                                     are most of a model, so other weights follow them and may not be parts
    INTERVAL, other sizes, VANILLA   consecutive ranks form an engine, as for training; shards need not overlap

A micro-DP group is the ranks of one training replica that hold the same generation shard. Where shards nest, weights
move only within these groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from hybridengine.errors import TopologyError, raise_all
from hybridengine.topology.experts import ExpertGrid
from hybridengine.topology.grid import Coordinate, Grid, Groups, Mesh
from hybridengine.topology.sizes import MODEL_AXES, GenSizes

SHARED_OUT = ("tp",)
"""Axes along which ranks with the same training shard may divide it: vLLM's tensor shards are parts of Megatron's, but
its stages need not be."""


class Grouping(str, Enum):
    INTERVAL = "interval"
    VANILLA = "vanilla"


@dataclass(frozen=True)
class GenerationGrid(Mesh):
    """Ranks of a training grid along the axes tp, pp and replica; TopologyError if p_g·t_g does not divide their number.

    ``groups("tp")`` returns the engines' tensor-parallel groups, in the order of generation tp. This can differ from the
    order of ranks: an engine that divides a training shard has gen tp 0 and 1 on tp 0.
    """

    train: Grid
    sizes: GenSizes
    grouping: Grouping = Grouping.INTERVAL

    def __post_init__(self) -> None:
        raise_all(self.sizes.problems_over(self.train.sizes), TopologyError)

    @cached_property
    def axes(self) -> dict[str, int]:
        engine = {axis: self.sizes[axis] for axis in reversed(MODEL_AXES)}
        return {**engine, "replica": self.num_replicas}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        if self._follows_experts:
            position = [self._by_experts(place) for place in self._expert_places]
        else:
            position_of = self._consecutive if self._is_consecutive else self._interval
            position = [position_of(place) for place in self.train.coordinates()]
        return tuple(sorted(range(len(position)), key=position.__getitem__))

    @property
    def micro_dp_size(self) -> int:
        """d_g = p·t / (p_g·t_g): generation replicas inside one training replica; TopologyError if sizes do not nest."""
        if not self.sizes.nests_in(self.train.sizes):
            raise TopologyError(
                f"generation {self.sizes} does not nest in training {self.train.sizes}, so that d_g is not defined;"
                " choose p_g from the divisors of p and t_g from those of t"
            )
        return self.train.sizes.model_parallel_size // self.sizes.num_ranks

    @property
    def num_replicas(self) -> int:
        """Engines that generate at the same time; d · d_g where the sizes nest."""
        return self.train.num_ranks // self.sizes.num_ranks

    @cached_property
    def nests(self) -> bool:
        """True if every rank's training shard is part of its generation shard, so that switching back is local."""
        train, gen = self.train.sizes, self.sizes
        return (
            gen.nests_in(train)
            and all(
                place[axis] * gen[axis] // train[axis] == own[axis]
                for place, own in zip(self.train.coordinates(), self.coordinates(), strict=True)
                for axis in MODEL_AXES
            )
            and self._experts_nest
        )

    @property
    def _experts_nest(self) -> bool:
        """True if every rank generates with the experts that it trains; always for one part and one shard, as without."""
        if self.sizes.tp_size == 1:
            return True
        train, gen = self.train.sizes, self.sizes
        sizes = {
            "ep": (train.expert_parts, gen.expert_parts),
            "etp": (train.expert_shards, gen.expert_shards),
        }
        return all(
            size % gen_size == 0 and place[axis] * gen_size // size == (own["tp"] if gen_size > 1 else 0)
            for place, own in zip(self._expert_places, self.coordinates(), strict=True)
            for axis, (size, gen_size) in sizes.items()
        )

    @cached_property
    def micro_dp_groups(self) -> Groups:
        """Ranks of one training replica that hold the same generation shard."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, (place, own) in enumerate(zip(self.train.coordinates(), self.coordinates(), strict=True)):
            found.setdefault(place.along(self._replica_axes) + own.along(MODEL_AXES), []).append(rank)
        return tuple(map(tuple, found.values()))

    @cached_property
    def _replica_axes(self) -> list[str]:
        """Axes along which training replicates the model, slowest first."""
        return [axis for axis in reversed(self.train.axes) if axis not in MODEL_AXES]

    @cached_property
    def _follows_experts(self) -> bool:
        train, gen = self.train.sizes, self.sizes
        return (
            self.grouping is Grouping.INTERVAL
            and gen.expert_parts > 1
            and train.expert_shards == 1
            and train.expert_parts % gen.expert_parts == 0
            and train.pp_size % gen.pp_size == 0
        )

    @cached_property
    def _is_consecutive(self) -> bool:
        """True if engines are consecutive positions of the training grid."""
        if self.grouping is Grouping.VANILLA:
            return True
        joined, parts = self._ratios
        return any(
            self.train.sizes[axis] * parts[axis] != self.sizes[axis] * joined[axis] for axis in MODEL_AXES
        )

    @cached_property
    def _ratios(self) -> tuple[dict[str, int], dict[str, int]]:
        """Per axis, (training indices per generation index, generation indices per training index); at least one is 1."""
        train, gen = self.train.sizes, self.sizes
        joined = {
            axis: train[axis] // gen[axis] if train[axis] % gen[axis] == 0 else 1 for axis in MODEL_AXES
        }
        parts = {axis: gen[axis] // train[axis] if gen[axis] % train[axis] == 0 else 1 for axis in SHARED_OUT}
        return joined, dict.fromkeys(MODEL_AXES, 1) | parts

    def _consecutive(self, place: Coordinate) -> int:
        """Return the position of a rank where engines are consecutive ranks of the paper's order, not the grid's."""
        position = 0
        for axis in (*self._replica_axes, *MODEL_AXES):
            position = position * self.train.axes[axis] + place[axis]
        return position

    def _interval(self, place: Coordinate) -> int:
        """Return the position of a rank when its generation shard contains its training shard, or is a part of it."""
        replica = 0
        for axis in self._replica_axes:
            replica = replica * self.train.axes[axis] + place[axis]
        joined, parts = self._ratios
        indices = {}
        for axis in MODEL_AXES:  # training indices joined by one generation index belong to different engines
            indices[axis], micro = divmod(place[axis], joined[axis])
            replica = replica * joined[axis] + micro
        for axis in MODEL_AXES:  # ranks with the same training index divide it among generation indices
            replica, part = divmod(replica, parts[axis])
            indices[axis] = indices[axis] * parts[axis] + part
        return replica * self.strides["replica"] + sum(
            indices[axis] * self.strides[axis] for axis in MODEL_AXES
        )

    @cached_property
    def _expert_places(self) -> tuple[Coordinate, ...]:
        """Coordinates of all ranks among experts."""
        return tuple(ExpertGrid(self.train).coordinates())

    def _by_experts(self, place: Coordinate) -> int:
        """Return the position of a rank when its generation shard contains the experts that it trains.

        `place` is its coordinate among experts.
        """
        train = self.train.sizes
        parts, joined = train.expert_parts // self.sizes.expert_parts, train.pp_size // self.sizes.pp_size
        tp_rank, rest = divmod(place["ep"], parts)
        pp_rank, micro = divmod(place["pp"], joined)
        replica = (place["edp"] * parts + rest) * joined + micro
        return replica * self.strides["replica"] + pp_rank * self.strides["pp"] + tp_rank * self.strides["tp"]

    def __str__(self) -> str:
        return f"generation {self.sizes} over training {self.train}"
