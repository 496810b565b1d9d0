"""Transfer protocols: the rows that each rank of a worker group receives, and the ranks whose results are collected.

A protocol is defined over row ranges, never over rows: for `num_rows` rows and a group's topology, it returns the range
of each rank, and the ranks whose results, in row order, form the result of the call. It does not transfer data.

    protocol           distribute                                        collect
    ONE_TO_ALL         the same rows to every rank                       from every rank
    3D_PROTO           split over DP, a DP group's rows to all its ranks concat: last stage, tp 0 of every DP group
    3D_ALL_MICRO_DP    split over all generation replicas                concat: one rank of each replica
    3D_PP_ONLY         the same rows to every rank                       from tp 0, dp 0 of every stage
    DP_PROTO           split over all ranks                              concat from every rank
    ALL_TO_ALL         one item per rank, made by the caller             from every rank

Uneven splits are allowed: sizes differ by at most one, earlier replicas get more. A splitting protocol must give rows to
every rank, because a rank that skips a collective makes its peers hang.

Source: HybridFlow, arXiv 2409.19256, table 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isfunction
from itertools import pairwise
from typing import Any, TypeVar, cast

from hybridengine.errors import ProtocolError
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Coordinate, Grid, Mesh, RankOrder
from hybridengine.topology.sizes import ROW_AXIS, GenSizes, TrainSizes

ROW_NUMBERS = "row_numbers"
"""Column of all rows: int64, the row's number among the rows of the call."""
RowRanges = tuple[range, ...]
"""One range of rows per rank of a group, in rank order."""


@dataclass(frozen=True)
class GroupTopology:
    """Arrangement of the ranks of one worker group."""

    grid: Grid
    generation: GenerationGrid | None = None
    """Generation groups of the same ranks; None if the group does not generate."""

    def __post_init__(self) -> None:
        if self.generation is not None and self.generation.train != self.grid:
            raise ProtocolError(
                f"the generation grid lies over {self.generation.train}, the group over {self.grid};"
                " build GenerationGrid on the group's own grid"
            )

    @classmethod
    def parse(
        cls, parallel: str, generate: str | None = None, order: RankOrder = RankOrder.PAPER
    ) -> GroupTopology:
        """Return the topology of sizes written as in the paper: parallel "p-t-d", generate "p_g-t_g"."""
        grid = Grid(TrainSizes.parse(parallel), order)
        return cls(grid, None if generate is None else GenerationGrid(grid, GenSizes.parse(generate)))

    @property
    def num_ranks(self) -> int:
        return self.grid.num_ranks

    def __str__(self) -> str:
        generates = "" if self.generation is None else f" generating at {self.generation.sizes}"
        return f"{self.grid.sizes}{generates}"


@dataclass(frozen=True)
class RankContext:
    """Context of one worker, the first argument of its constructor: ``Worker(context, **config)``."""

    role: str
    """Name of the worker group, e.g. "actor"."""
    rank: int
    """Rank in the pool, equal to the torch.distributed rank."""
    world_size: int
    topology: GroupTopology
    """Arrangement of the group's ranks."""
    coordinate: Coordinate
    """Training coordinate of this rank in the topology."""
    node: str
    """Address of the machine."""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} ({self.coordinate}, node {self.node})"


@dataclass(frozen=True)
class Protocol:
    """Distribution of a call's rows to the ranks of a group, and collection of the results."""

    name: str
    split: Callable[[int, GroupTopology], RowRanges]
    """(num_rows, topology) -> the rows of each rank."""
    sources: Callable[[GroupTopology], tuple[int, ...]]
    """Ranks whose results are collected, in row order."""
    concatenates: bool
    """True if the sources' rows are concatenated to one batch; otherwise the result is a list by source rank."""
    takes_items: bool = False
    """True if every argument is a list with one item per rank instead of a batch of rows."""

    def __str__(self) -> str:
        return self.name

    def row_ranges(self, num_rows: int, topology: GroupTopology) -> RowRanges:
        """Return the result of `split`; ProtocolError for too few rows, or ranges that `sources` do not tile."""
        ranges = self.split(num_rows, topology)
        are_inside = all(rows.step == 1 and 0 <= rows.start <= rows.stop <= num_rows for rows in ranges)
        if len(ranges) != topology.num_ranks or not are_inside:
            raise ProtocolError(
                f"{self.name} splits {num_rows} rows into {', '.join(map(str, ranges))} for {topology.num_ranks} ranks"
                f" ({topology}); `split` must return one range per rank, with step 1 and inside of the rows"
            )
        found = [ranges[rank] for rank in self.source_ranks(topology)]
        ends = [0, *(rows.stop for rows in found)]
        if self.concatenates and ends != [*(rows.start for rows in found), num_rows]:
            raise ProtocolError(
                f"{self.name} concatenates {', '.join(map(str, found))} of {num_rows} rows; the ranges of `sources`, in"
                " order, must cover every row once"
            )
        return ranges

    def source_ranks(self, topology: GroupTopology) -> tuple[int, ...]:
        """Return the result of `sources`; ProtocolError if it is not one or more distinct ranks of the group."""
        ranks = tuple(self.sources(topology))
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(topology.num_ranks)):
            raise ProtocolError(
                f"{self.name} collects from ranks {ranks} of {topology};"
                f" `sources` must return distinct ranks between 0 and {topology.num_ranks - 1}"
            )
        return ranks


def even_split(num_rows: int, num_parts: int, parts: str = "parts") -> RowRanges:
    """Return consecutive ranges whose sizes differ by at most one, larger ones first; ProtocolError for too few rows."""
    if num_rows < num_parts:
        raise ProtocolError(
            f"{num_rows} rows cannot be split over {num_parts} {parts}: each needs at least one row,"
            f" or its ranks would miss the group's collectives; pass {num_parts} rows or more"
        )
    size, longer = divmod(num_rows, num_parts)
    starts = [part * size + min(part, longer) for part in range(num_parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def _all_ranks(topology: GroupTopology) -> tuple[int, ...]:
    return tuple(range(topology.num_ranks))


def _same_rows(num_rows: int, topology: GroupTopology) -> RowRanges:
    return (range(num_rows),) * topology.num_ranks


def _split_over(mesh: Mesh, axis: str, num_rows: int, parts: str) -> RowRanges:
    """Return the rows split along one axis; ranks that differ along other axes get the same rows."""
    ranges = even_split(num_rows, mesh.axis_size(axis), parts)
    return tuple(ranges[place[axis]] for place in mesh.coordinates())


def _split_over_dp(num_rows: int, topology: GroupTopology) -> RowRanges:
    return _split_over(topology.grid, ROW_AXIS, num_rows, f"data-parallel replicas of {topology}")


def _split_over_replicas(num_rows: int, topology: GroupTopology) -> RowRanges:
    return _split_over(_generation(topology), "replica", num_rows, f"generation replicas of {topology}")


def _split_over_ranks(num_rows: int, topology: GroupTopology) -> RowRanges:
    return even_split(num_rows, topology.num_ranks, f"ranks of {topology}")


def _one_item_each(num_items: int, topology: GroupTopology) -> RowRanges:
    if num_items != topology.num_ranks:
        raise ProtocolError(
            f"{num_items} items for the {topology.num_ranks} ranks of {topology}: ALL_TO_ALL splits nothing;"
            " pass lists with one item per rank, in rank order"
        )
    return tuple(range(rank, rank + 1) for rank in range(num_items))


def _last_stage_of_dp(topology: GroupTopology) -> tuple[int, ...]:
    return topology.grid.line(ROW_AXIS, at_end_of="pp")


def _last_stage_of_replicas(topology: GroupTopology) -> tuple[int, ...]:
    return _generation(topology).line("replica", at_end_of="pp")


def _every_stage(topology: GroupTopology) -> tuple[int, ...]:
    return topology.grid.line("pp")


def _generation(topology: GroupTopology) -> GenerationGrid:
    if topology.generation is None:
        raise ProtocolError(
            f"3D_ALL_MICRO_DP needs generation sizes, and the group {topology} has none;"
            ' give it some, e.g. generate="1-1", or register the method with 3D_PROTO'
        )
    return topology.generation


ONE_TO_ALL = Protocol("ONE_TO_ALL", _same_rows, _all_ranks, concatenates=False)
"""The same rows to every rank, results from every rank."""
PROTO_3D = Protocol("3D_PROTO", _split_over_dp, _last_stage_of_dp, concatenates=True)
"""Rows split over data-parallel groups, concatenated results from the last stage."""
PROTO_3D_ALL_MICRO_DP = Protocol(
    "3D_ALL_MICRO_DP", _split_over_replicas, _last_stage_of_replicas, concatenates=True
)
"""Rows split over generation replicas, concatenated results from one rank of each."""
PROTO_3D_PP_ONLY = Protocol("3D_PP_ONLY", _same_rows, _every_stage, concatenates=False)
"""The same rows to every rank, results from one rank of every stage."""
DP_PROTO = Protocol("DP_PROTO", _split_over_ranks, _all_ranks, concatenates=True)
"""Rows split over all ranks, concatenated results from every rank."""
ALL_TO_ALL = Protocol("ALL_TO_ALL", _one_item_each, _all_ranks, concatenates=False, takes_items=True)
"""One item per rank, made by the caller, results from every rank."""

_ATTRIBUTE = "_registration"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Registration:
    """Properties of a worker method, as given to `register`."""

    protocol: Protocol
    columns: tuple[str, ...] | None = None
    optional: tuple[str, ...] = ()
    returns_rows: bool = False


def register(
    protocol: Protocol,
    columns: Sequence[str] | None = None,
    *,
    optional: Sequence[str] = (),
    returns_rows: bool = False,
) -> Callable[[_Function], _Function]:
    """Return a decorator that makes a worker method callable through its group, with rows distributed by `protocol`.

    Args:
        columns: columns that the method reads, the only ones fetched; None for all.
        optional: additional columns that it reads if they exist.
        returns_rows: True if the method returns a TensorDict with as many rows as its input, at least on the protocol's
            source ranks. The rows stay there, and the caller gets a reference to them.
    """
    if not isinstance(protocol, Protocol):
        raise ProtocolError(f"@register({protocol!r}) names no protocol; write e.g. @register(PROTO_3D)")
    if returns_rows and not protocol.concatenates:
        raise ProtocolError(
            f"@register({protocol.name}, returns_rows=True): {protocol.name} does not put rows together; choose a"
            " protocol that does, e.g. 3D_PROTO"
        )
    registration = Registration(
        protocol, None if columns is None else tuple(columns), tuple(optional), returns_rows
    )

    def mark(function: _Function) -> _Function:
        if not isfunction(cast(object, function)):
            raise ProtocolError(
                f"@register({protocol.name}) decorates {function!r}, which is not a plain method;"
                " put @register outermost, on a method that takes self"
            )
        setattr(function, _ATTRIBUTE, registration)
        return function

    return mark


def registered(cls: type) -> dict[str, tuple[Callable[..., Any], Registration]]:
    """Return the registered methods of `cls` and its bases by name; an overriding method must be registered as well."""
    found: dict[str, tuple[Callable[..., Any], Registration]] = {}
    for base in reversed(cls.__mro__):
        for name, function in vars(base).items():
            registration = vars(function).get(_ATTRIBUTE) if isfunction(function) else None
            if registration is not None:
                found[name] = (function, registration)
            elif name in found:
                raise ProtocolError(
                    f"{base.__name__}.{name} overrides a method registered with {found[name][1].protocol.name} without"
                    f" @register; decorate it with a protocol as well"
                )
    return found
