"""Rank <-> coordinate of a training grid, and the groups of ranks along any of its axes.

A grid is `range(num_ranks)` reshaped; the *rank order* says which axis varies fastest:

    MEGATRON   tp, dp, pp   Megatron's default "tp-cp-ep-dp-pp": pipeline peers are t·d ranks apart
    PAPER      tp, pp, dp   the paper's, Megatron's `--use-tp-pp-dp-mapping`: a replica is p·t consecutive ranks

Source: HybridFlow, arXiv 2409.19256, section 5.3; the orders are Megatron-core's `RankGenerator`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from hybridengine.errors import TopologyError
from hybridengine.topology.sizes import TrainSizes

Groups = tuple[tuple[int, ...], ...]
"""Disjoint groups of global ranks, each ascending, in the order of their first rank."""


class RankOrder(str, Enum):
    """Which axis varies fastest with the global rank, fastest first."""

    MEGATRON = "tp-dp-pp"
    PAPER = "tp-pp-dp"

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.value.split("-"))


@dataclass(frozen=True, order=True)
class Coordinate:
    """Place of a rank in a training grid."""

    pp_rank: int
    dp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"pp={self.pp_rank} dp={self.dp_rank} tp={self.tp_rank}"


@dataclass(frozen=True)
class Grid:
    """The ranks 0..p·t·d-1 arranged along the axes pp, dp and tp."""

    sizes: TrainSizes
    order: RankOrder = RankOrder.PAPER

    @property
    def num_ranks(self) -> int:
        return self.sizes.num_ranks

    def axis_size(self, axis: str) -> int:
        if axis not in ("pp", "dp", "tp"):
            raise TopologyError(f"axis {axis!r} does not exist; axes are pp, dp and tp")
        return getattr(self.sizes, f"{axis}_size")

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a global rank.

        Raises:
            TopologyError: the rank is outside of the grid.
        """
        if not 0 <= rank < self.num_ranks:
            raise TopologyError(
                f"rank {rank} is outside of {self.sizes}, which has ranks 0 to {self.num_ranks - 1}"
            )
        return self._coordinates[rank]

    @cached_property
    def _coordinates(self) -> tuple[Coordinate, ...]:
        found, axes = [], [(axis, self.axis_size(axis)) for axis in self.order.axes]
        for rank in range(self.num_ranks):
            place = {}
            for axis, size in axes:
                rank, place[axis] = divmod(rank, size)
            found.append(Coordinate(place["pp"], place["dp"], place["tp"]))
        return tuple(found)

    def rank(self, coordinate: Coordinate) -> int:
        """Global rank at a coordinate, the inverse of `coordinate`."""
        rank, stride = 0, 1
        for axis in self.order.axes:
            index = getattr(coordinate, f"{axis}_rank")
            if not 0 <= index < self.axis_size(axis):
                raise TopologyError(
                    f"{axis}_rank={index} is outside of {self.sizes}, whose {axis} size is {self.axis_size(axis)}"
                )
            rank += index * stride
            stride *= self.axis_size(axis)
        return rank

    def coordinates(self) -> Iterator[Coordinate]:
        """Coordinates of ranks 0, 1, 2, ..."""
        return iter(self._coordinates)

    def groups(self, *axes: str) -> Groups:
        """All groups of ranks that differ only along `axes`; they partition the ranks.

        ``groups("tp")`` are the tensor-parallel groups, ``groups("pp", "tp")`` the model-parallel ones.
        """
        for axis in axes:
            self.axis_size(axis)  # raises for an axis that does not exist
        fixed = [axis for axis in ("pp", "dp", "tp") if axis not in axes]
        return group_by(
            range(self.num_ranks),
            lambda rank: tuple(getattr(self.coordinate(rank), f"{axis}_rank") for axis in fixed),
        )

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The one of `groups(*axes)` that holds `rank`.

        Raises:
            TopologyError: the rank is outside of the grid, or an axis does not exist.
        """
        self.coordinate(rank)  # raises for a rank that does not exist
        return next(group for group in self.groups(*axes) if rank in group)


def group_by(ranks: Iterable[int], key) -> Groups:
    """Ranks grouped by `key(rank)`, each group ascending, groups in the order of their first rank."""
    found: dict[object, list[int]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return tuple(tuple(group) for group in found.values())
