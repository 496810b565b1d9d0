"""Meshes of ranks along named axes: the coordinate of a rank, the rank at a coordinate, and the groups along any axes.

A mesh is `range(num_ranks)` reshaped. Its first axis varies fastest with the rank. Two orders of the training grid have
names:

    MEGATRON   tp, dp, pp   Megatron's default: pipeline peers are t·d ranks apart
    PAPER      tp, pp, dp   the paper's, Megatron's `--use-tp-pp-dp-mapping`: a replica is p·t consecutive ranks

Source: HybridFlow, arXiv 2409.19256, section 5.3; the orders are Megatron-core's `RankGenerator`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property

from hybridengine.errors import TopologyError
from hybridengine.topology.sizes import TrainSizes

Groups = tuple[tuple[int, ...], ...]
"""Disjoint groups of global ranks, in the order of the lowest rank of each."""


class Coordinate:
    """Index of a rank along each axis: `Coordinate(pp=1, tp=0)["pp"]` and `.pp_rank` are both 1."""

    __slots__ = ("_indices",)

    def __init__(self, **indices: int) -> None:
        self._indices = indices

    def __getitem__(self, axis: str) -> int:
        return self._indices[axis]

    def __getattr__(self, name: str) -> int:
        axis = name.removesuffix("_rank")
        if axis == name or axis not in self._indices:
            raise AttributeError(f"a coordinate has no {name}")
        return self._indices[axis]

    def along(self, axes: Iterable[str]) -> tuple[int, ...]:
        return tuple([self._indices[axis] for axis in axes])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coordinate) and self._indices == other._indices

    def __hash__(self) -> int:
        return hash(frozenset(self._indices.items()))

    def __str__(self) -> str:
        return " ".join(f"{axis}={index}" for axis, index in self._indices.items())

    __repr__ = __str__


class Mesh(ABC):
    """Ranks arranged along named axes; subclasses define the axes."""

    @property
    @abstractmethod
    def axes(self) -> dict[str, int]:
        """Axis -> size; the first axis varies fastest."""

    @property
    def ranks(self) -> Sequence[int]:
        """The rank at each position; position 0 has index 0 along every axis."""
        return range(self.num_ranks)

    @cached_property
    def num_ranks(self) -> int:
        return math.prod(self.axes.values())

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is derived, and grows with the number of ranks: each process derives it anew."""
        assert is_dataclass(self), "a mesh is made of its fields"
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def axis_size(self, axis: str) -> int:
        """Return the number of ranks along one axis; TopologyError if it does not exist."""
        if axis not in self.axes:
            *others, last = self._listed
            raise TopologyError(f"axis {axis!r} does not exist; axes are {', '.join(others)} and {last}")
        return self.axes[axis]

    @cached_property
    def strides(self) -> dict[str, int]:
        """Axis -> distance in positions between neighbours along it."""
        strides, stride = {}, 1
        for axis, size in self.axes.items():
            strides[axis] = stride
            stride *= size
        return strides

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of a global rank; TopologyError if it is outside the mesh."""
        if not 0 <= rank < self.num_ranks:
            raise TopologyError(
                f"rank {rank} is outside of {self}, which has ranks 0 to {self.num_ranks - 1}"
            )
        return self._coordinates[rank]

    @cached_property
    def _coordinates(self) -> tuple[Coordinate, ...]:
        listed = [(axis, self.axes[axis], self.strides[axis]) for axis in self._listed]
        places: list[Coordinate] = [Coordinate()] * self.num_ranks
        for position, rank in enumerate(self.ranks):
            places[rank] = Coordinate(**{axis: position // stride % size for axis, size, stride in listed})
        return tuple(places)

    @property
    def _listed(self) -> list[str]:
        """The axes in display order, whatever the order of the ranks is."""
        return sorted(self.axes, key=("replica", *reversed(RankOrder.MEGATRON.axes)).index)

    def coordinates(self) -> Iterator[Coordinate]:
        """Yield the coordinates of ranks 0, 1, 2, ..."""
        return iter(self._coordinates)

    def groups(self, *axes: str) -> Groups:
        """Return all groups of ranks that differ only along `axes`; in a group, the mesh's first axis varies fastest.

        ``groups("tp")`` returns the tensor-parallel groups, ``groups("pp", "tp")`` the model-parallel ones.
        """
        for axis in axes:
            self.axis_size(axis)  # raises if the axis does not exist
        inside = self._offsets([axis for axis in self.axes if axis in axes])
        origins = self._offsets([axis for axis in self.axes if axis not in axes])
        ranks = self.ranks
        return tuple(sorted((tuple([ranks[o + i] for i in inside]) for o in origins), key=min))

    def line(self, axis: str, at_end_of: str = "") -> tuple[int, ...]:
        """Return the ranks along `axis` that are last along the axis `at_end_of` and first along all others."""
        origin = (self.axis_size(at_end_of) - 1) * self.strides[at_end_of] if at_end_of else 0
        return tuple(self.ranks[origin + offset] for offset in self._offsets([axis]))

    def _offsets(self, axes: Iterable[str]) -> list[int]:
        """Return the positions of all indices along `axes`, at index 0 along the others; the first varies fastest."""
        offsets = [0]
        for axis in axes:
            size, stride = self.axis_size(axis), self.strides[axis]
            offsets = [index * stride + offset for index in range(size) for offset in offsets]
        return offsets


def group_with(rank: int, groups: Groups) -> tuple[int, ...]:
    """Return the group of `groups` that contains `rank`; TopologyError if there is none."""
    for group in groups:
        if rank in group:
            return group
    raise TopologyError(f"rank {rank} is in none of the {len(groups)} groups; choose a rank of one of them")


SHOWN_GROUPS = SHOWN_RANKS = 8


def format_groups(groups: Groups, shown: int = SHOWN_GROUPS) -> str:
    """Return the first `shown` groups and the total number: "[0,1] [2,3] ... 64 groups"."""
    text = " ".join(format_ranks(group) for group in groups[:shown])
    return text + (f" ... {len(groups)} groups" if len(groups) > shown else "")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks of one group, "[0,1,2,3]"; a long group is shortened to its first two and its last."""
    if len(ranks) > SHOWN_RANKS:
        return f"[{ranks[0]},{ranks[1]},...,{ranks[-1]}]"
    return "[" + ",".join(map(str, ranks)) + "]"


AXIS_NAMES = {
    "tp": "tensor",
    "cp": "context",
    "etp": "expert tensor",
    "ep": "expert",
    "edp": "expert data",
    "pp": "pipeline",
    "dp": "data",
}
"""Axis -> display name, in the order in which groups are listed."""


class RankOrder(str, Enum):
    """Order of the axes, fastest-varying first; a grid uses those that it has."""

    MEGATRON = "tp-cp-ep-dp-pp"
    PAPER = "tp-cp-ep-pp-dp"

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.value.split("-"))


@dataclass(frozen=True)
class Grid(Mesh):
    """The ranks 0..p·t·d-1 arranged along the training axes."""

    sizes: TrainSizes
    order: RankOrder = RankOrder.PAPER

    def __post_init__(self) -> None:
        lacking = [axis for axis in self.sizes.axes() if axis not in self.order.axes]
        if lacking:
            raise TopologyError(
                f"rank order {self.order.value} has no place for the axes {', '.join(lacking)}; name them as axes of"
                " RankOrder"
            )

    @cached_property
    def axes(self) -> dict[str, int]:
        """Axis -> size; axes that are written by a letter exist only if they are larger than 1."""
        sizes, named = dict(self.sizes.items()), self.sizes.named
        return {
            axis: sizes[axis]
            for axis in self.order.axes
            if axis in sizes and (sizes[axis] > 1 or f"{axis}_size" not in named)
        }

    def axis_size(self, axis: str) -> int:
        absent = axis not in self.axes and f"{axis}_size" in self.sizes.named
        return 1 if absent else super().axis_size(axis)

    def __str__(self) -> str:
        return str(self.sizes)


def named_groups(mesh: Mesh) -> list[tuple[str, Groups]]:
    """Return the name of each axis of the mesh with the groups along it."""
    return [(name, mesh.groups(axis)) for axis, name in AXIS_NAMES.items() if axis in mesh.axes]
