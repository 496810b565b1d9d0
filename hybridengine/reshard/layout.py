"""A layout says which parameters each rank has, and which boxes of which logical tensors they hold.

Layouts are data: fused projections, replicated heads, padded vocabularies, tied embeddings and uneven pipeline stages
are rows of these tables. `hf`, `megatron` and `vllm` beside this file write the tables; everything that moves weights
reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybridengine.errors import PlanError
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.boxes import Box, extents, full_box, moved, num_elements, starts, view_index


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor, and where it lies in a local parameter."""

    tensor: str
    box: Box
    offset: tuple[int, ...]
    """Index in the local parameter of the box's first element.

    A parameter of more dims than the tensor, such as a stack of experts, has the box at one index of its first dims."""

    @property
    def local_box(self) -> Box:
        """Box of the local parameter that holds the piece."""
        return self.in_parameter(self.box)

    @property
    def index(self) -> tuple[int | slice, ...]:
        """Index that gives a view of the local parameter, an array or a tensor, with the box's shape."""
        return view_index(self.offset, extents(self.box))

    def start_in_parameter(self, part: Box) -> tuple[int, ...]:
        """Return the index in the local parameter of the first element of `part`, a box inside the piece."""
        offset, leading = self.offset, len(self.offset) - len(part)
        inside = zip(part, self.box, offset[leading:], strict=True)
        # Plans ask for every part of every move: a list is made faster than a generator.
        return offset[:leading] + tuple([start - first + index for (start, _), (first, _), index in inside])

    def in_parameter(self, part: Box) -> Box:
        """Return `part`, a box inside the piece, in indices of the local parameter."""
        sizes = (1,) * (len(self.offset) - len(part)) + extents(part)
        return tuple((i, i + size) for i, size in zip(self.start_in_parameter(part), sizes, strict=True))

    def in_tensor(self, local: Box) -> Box:
        """Return `local`, a box of the local parameter inside the piece, in indices of the logical tensor."""
        leading = len(self.offset) - len(self.box)
        return moved(local[leading:], self.offset[leading:], starts(self.box))


@dataclass(frozen=True)
class LocalParameter:
    """A parameter as one rank stores it; elements that no piece covers are padding and stay zero."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding_of: str = ""
    """The logical tensor that a parameter without pieces, all padding, belongs to."""

    @property
    def tensor(self) -> str:
        """Logical tensor of the first piece; decides with which bucket the parameter comes and goes."""
        return self.pieces[0].tensor if self.pieces else self.padding_of

    @cached_property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def has_padding(self) -> bool:
        return sum(num_elements(piece.box) for piece in self.pieces) < self.num_elements


@dataclass(frozen=True)
class Shard:
    """All parameters of one place in a layout."""

    parameters: tuple[LocalParameter, ...]

    @property
    def num_elements(self) -> int:
        return sum(parameter.num_elements for parameter in self.parameters)

    @cached_property
    def by_name(self) -> dict[str, LocalParameter]:
        """Parameter name -> parameter."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def by_tensor(self) -> dict[str, list[LocalParameter]]:
        """Logical tensor -> parameters that come and go with it."""
        found: dict[str, list[LocalParameter]] = {}
        for parameter in self.parameters:
            found.setdefault(parameter.tensor, []).append(parameter)
        return found

    @cached_property
    def pieces(self) -> dict[str, list[tuple[str, Piece]]]:
        """Logical tensor -> (parameter name, piece) for everything that this shard holds."""
        found: dict[str, list[tuple[str, Piece]]] = {}
        for parameter in self.parameters:
            for piece in parameter.pieces:
                found.setdefault(piece.tensor, []).append((parameter.name, piece))
        return found


ShardKey = tuple[int, ...]
"""Coordinates that decide what a rank holds, e.g. (pp rank, tp rank)."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Shards of a model over ranks. Ranks with the same key hold the same shard.

    Functions that make layouts return the same object for the same arguments: plans are looked up by it.
    """

    shape: ModelShape
    keys: Mapping[int, ShardKey]
    """Rank -> key of its shard."""
    shards: Mapping[ShardKey, Shard]
    kind: str = ""
    """Name of the layout in messages: "megatron 2-2-1"."""

    @cached_property
    def holders(self) -> dict[str, list[tuple[ShardKey, Piece]]]:
        """Logical tensor -> (key of a shard, piece) for everything that holds a part of it, in the order of the keys."""
        found: dict[str, list[tuple[ShardKey, Piece]]] = {}
        for key, shard in sorted(self.shards.items()):
            for tensor, pieces in shard.pieces.items():
                found.setdefault(tensor, []).extend((key, piece) for _, piece in pieces)
        return found

    def shard(self, rank: int) -> Shard:
        """Return the shard of `rank`.

        Raises:
            PlanError: the layout has no such rank.
        """
        if rank not in self.keys:
            raise PlanError(
                f"rank {rank} is not part of the layout {self.kind}; its ranks are {list(self.keys)}"
            )
        return self.shards[self.keys[rank]]

    def held(self, rank: int) -> Shard:
        """Return the shard of `rank`; an empty one for a rank outside of the layout."""
        return self.shards[self.keys[rank]] if rank in self.keys else _EMPTY


_EMPTY = Shard(())


def whole(name: str, tensor: str, shape: tuple[int, ...]) -> LocalParameter:
    """Return a parameter that is a logical tensor, unsharded."""
    return LocalParameter(name, shape, (Piece(tensor, full_box(shape), (0,) * len(shape)),))


def sharded(
    name: str, tensor: str, shape: tuple[int, ...], dim: int, index: int, count: int
) -> LocalParameter:
    """Return shard `index` of `count` equal shards of a logical tensor along `dim`."""
    size = shape[dim] // count
    box = list(full_box(shape))
    box[dim] = (index * size, (index + 1) * size)
    local = (*shape[:dim], size, *shape[dim + 1 :])
    return LocalParameter(name, local, (Piece(tensor, tuple(box), (0,) * len(shape)),))


def row_stack(name: str, parts: list[tuple[str, tuple[int, ...], tuple[int, int]]]) -> LocalParameter:
    """Return a parameter made of row ranges of logical tensors, one below the other.

    Each part is (logical tensor, its shape, (first row, last row + 1)); empty ranges are left out.
    """
    pieces, row = [], 0
    columns: tuple[int, ...] = ()
    for tensor, shape, (start, stop) in parts:
        columns = shape[1:]
        if start < stop:
            pieces.append(Piece(tensor, ((start, stop), *full_box(columns)), (row, *(0 for _ in columns))))
            row += stop - start
    return LocalParameter(name, (row, *columns), tuple(pieces))


def stacked(name: str, parameters: Sequence[LocalParameter]) -> LocalParameter:
    """Return parameters of one shape stacked along a new first dim, as engines keep the weights of experts."""
    pieces = tuple(
        Piece(piece.tensor, piece.box, (index, *piece.offset))
        for index, parameter in enumerate(parameters)
        for piece in parameter.pieces
    )
    return LocalParameter(name, (len(parameters), *parameters[0].shape), pieces)


def vocab_shard(
    name: str, tensor: str, shape: tuple[int, ...], padded_rows: int, index: int, count: int
) -> LocalParameter:
    """Return shard `index` of `count` of a vocabulary matrix padded to `padded_rows`; padding rows have no piece."""
    size = padded_rows // count
    start, stop = index * size, min((index + 1) * size, shape[0])
    pieces = (Piece(tensor, ((start, stop), (0, shape[1])), (0, 0)),) if start < stop else ()
    return LocalParameter(name, (size, shape[1]), pieces, padding_of=tensor)
