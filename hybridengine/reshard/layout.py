"""Layouts: the parameters of each rank, and the boxes of logical tensors that they hold.

Layouts are data: fused projections, replicated heads, padded vocabularies, tied embeddings and uneven pipeline stages
are rows of these tables. The modules `megatron` and `vllm` write the tables, a Hugging Face checkpoint has a trivial one;
all code that moves weights reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hybridengine.errors import PlanError
from hybridengine.families.family import Entry, Rows, Stack, Whole
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.boxes import Box, extents, full_box, moved, num_elements, starts, view_index


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor, and its position in a local parameter."""

    tensor: str
    box: Box
    offset: tuple[int, ...]
    """Index of the box's first element in the local parameter."""

    @property
    def local_box(self) -> Box:
        """Box of the local parameter that the piece occupies."""
        return self.in_parameter(self.box)

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the view of the local parameter, an array or a tensor, that has the box's shape."""
        return view_index(self.offset, extents(self.box))

    def start_in_parameter(self, part: Box) -> tuple[int, ...]:
        """Return the index of the first element of `part` in the local parameter."""
        inside = zip(part, self.box, self.offset, strict=True)
        # Called for every part of every move: a list is built faster than a generator.
        return tuple([start - first + index for (start, _), (first, _), index in inside])

    def in_parameter(self, part: Box) -> Box:
        """Return `part`, a box inside the piece, in coordinates of the local parameter."""
        return moved(part, starts(self.box), self.offset)

    def in_tensor(self, local: Box) -> Box:
        """Return `local`, a box of the local parameter inside the piece, in coordinates of the logical tensor."""
        return moved(local, self.offset, starts(self.box))


@dataclass(frozen=True)
class LocalParameter:
    """A parameter as stored by one rank; elements not covered by a piece are padding and stay zero."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding_of: str = ""
    """Logical tensor to which an all-padding parameter, without pieces, belongs."""

    @property
    def tensor(self) -> str:
        """Logical tensor of the first piece, which determines the parameter's bucket."""
        return self.pieces[0].tensor if self.pieces else self.padding_of

    @cached_property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def tensors(self) -> frozenset[str]:
        """Logical tensors of all pieces."""
        return frozenset([piece.tensor for piece in self.pieces])

    @property
    def has_padding(self) -> bool:
        return sum(num_elements(piece.box) for piece in self.pieces) < self.num_elements


@dataclass(frozen=True)
class Shard:
    """All parameters at one place of a layout."""

    parameters: tuple[LocalParameter, ...]

    @property
    def num_elements(self) -> int:
        return sum(parameter.num_elements for parameter in self.parameters)

    @cached_property
    def num_logical(self) -> int:
        """Number of elements of logical tensors, each box counted once."""
        boxes = {(tensor, piece.box) for tensor, held in self.pieces.items() for _, piece in held}
        return sum(num_elements(box) for _, box in boxes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Parameter name -> elements of its storage."""
        return {parameter.name: parameter.num_elements for parameter in self.parameters}

    @cached_property
    def by_name(self) -> dict[str, LocalParameter]:
        """Parameter name -> parameter."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def by_tensor(self) -> dict[str, list[LocalParameter]]:
        """Logical tensor -> parameters in the same bucket."""
        found: dict[str, list[LocalParameter]] = {}
        for parameter in self.parameters:
            found.setdefault(parameter.tensor, []).append(parameter)
        return found

    @cached_property
    def pieces(self) -> dict[str, list[tuple[str, Piece]]]:
        """Logical tensor -> (parameter name, piece) for all pieces of this shard."""
        found: dict[str, list[tuple[str, Piece]]] = {}
        for parameter in self.parameters:
            for piece in parameter.pieces:
                found.setdefault(piece.tensor, []).append((parameter.name, piece))
        return found

    def parameters_of(self, tensors: Iterable[str]) -> list[LocalParameter]:
        """Return the parameters whose bucket is that of `tensors`."""
        return [parameter for tensor in tensors for parameter in self.by_tensor.get(tensor, ())]

    def boxes(self, tensor: str) -> list[tuple[tuple[str, Piece], Box]]:
        """Return ((parameter name, piece), box of the piece) for all pieces of a tensor."""
        return [(where, where[1].box) for where in self.pieces.get(tensor, ())]


ShardKey = tuple[int, ...]
"""Coordinates that determine a rank's shard, such as (pp rank, tp rank)."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Shards of a model over ranks. Ranks with the same key hold the same shard.

    Functions that build layouts return the same object for the same arguments, as plans are cached by layout.
    """

    shape: ModelShape
    keys: Mapping[int, ShardKey]
    """Rank -> key of its shard."""
    shards: Mapping[ShardKey, Shard]
    kind: str = ""
    """Name of the layout in messages: "megatron 2-2-1"."""

    @cached_property
    def holders(self) -> dict[str, list[tuple[ShardKey, Piece]]]:
        """Logical tensor -> (key of a shard, piece) for all pieces of the tensor, in the order of the keys."""
        found: dict[str, list[tuple[ShardKey, Piece]]] = {}
        for key, shard in sorted(self.shards.items()):
            for tensor, pieces in shard.pieces.items():
                found.setdefault(tensor, []).extend((key, piece) for _, piece in pieces)
        return found

    def shard(self, rank: int) -> Shard:
        """Return the shard of `rank`; PlanError if it is not in the layout."""
        if rank not in self.keys:
            raise PlanError(
                f"rank {rank} is not part of the layout {self.kind}; its ranks are {list(self.keys)}"
            )
        return self.shards[self.keys[rank]]

    def held(self, rank: int) -> Shard:
        """Return the shard of `rank`, or an empty one for a rank outside the layout."""
        return self.shards[self.keys[rank]] if rank in self.keys else _EMPTY


_EMPTY = Shard(())


@lru_cache(maxsize=16)
def hf_layout(
    shape: ModelShape, ranks: tuple[int, ...] = (0,), names: tuple[str, ...] | None = None
) -> Layout:
    """Return the layout of a Hugging Face checkpoint: each of `ranks` holds the logical tensors `names`, by default all,
    under their own names."""
    held = shape.tensors if names is None else names
    shard = Shard(tuple(whole(name, name, shape.tensors[name]) for name in held))
    return Layout(shape, dict.fromkeys(ranks, ()), {(): shard}, kind="hugging face")


def whole(name: str, tensor: str, shape: tuple[int, ...]) -> LocalParameter:
    """Return a parameter that is an unsharded logical tensor."""
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
    """Return a parameter that stacks the non-empty ones of `parts`: (logical tensor, its shape, (first row, end))."""
    pieces, row = [], 0
    columns: tuple[int, ...] = ()
    for tensor, shape, (start, stop) in parts:
        columns = shape[1:]
        if start < stop:
            pieces.append(Piece(tensor, ((start, stop), *full_box(columns)), (row, *(0 for _ in columns))))
            row += stop - start
    return LocalParameter(name, (row, *columns), tuple(pieces))


def vocab_shard(
    name: str, tensor: str, shape: tuple[int, ...], padded_rows: int, index: int, count: int
) -> LocalParameter:
    """Return shard `index` of `count` of a vocabulary matrix padded to `padded_rows`; padding rows have no piece."""
    size = padded_rows // count
    start, stop = index * size, min((index + 1) * size, shape[0])
    pieces = (Piece(tensor, ((start, stop), (0, shape[1])), (0, 0)),) if start < stop else ()
    return LocalParameter(name, (size, shape[1]), pieces, padding_of=tensor)


def held_experts(num_experts: int, part: int, num_parts: int) -> range:
    """Return the experts of part `part` of `num_parts`, which are consecutive in both backends."""
    each = num_experts // num_parts
    return range(part * each, (part + 1) * each)


def layer_parameters(
    entries: Iterable[Entry],
    prefixes: tuple[str, str],
    tensors: Mapping[str, tuple[int, ...]],
    tp_rank: int,
    tp_size: int,
) -> Iterator[LocalParameter]:
    """Yield the parameters of one decoder layer on `tp_rank`, given the prefixes of their names and of its tensors."""
    parameter_prefix, tensor_prefix = prefixes
    for entry in entries:
        name = parameter_prefix + entry.name
        if isinstance(entry, Stack):
            named = [(tensor_prefix + tensor, rows) for tensor, rows in _ranges(entry, tp_rank, tp_size)]
            yield row_stack(name, [(tensor, tensors[tensor], rows) for tensor, rows in named])
            continue
        tensor = tensor_prefix + entry.tensor
        if isinstance(entry, Whole):
            yield whole(name, tensor, tensors[tensor])
        else:
            yield sharded(name, tensor, tensors[tensor], dim=1, index=tp_rank, count=tp_size)


def _ranges(stack: Stack, tp_rank: int, tp_size: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (logical tensor, range of rows) from top to bottom."""
    count = stack.groups or tp_size  # without groups, each rank is one
    for group in range(tp_rank * count // tp_size, (tp_rank + 1) * count // tp_size):
        for section in stack.sections:
            yield section.tensor, _share(section, group, count)


def _share(section: Rows, index: int, count: int) -> tuple[int, int]:
    """Return the rows of share `index` of `count`; with fewer units than shares, consecutive shares get the same unit."""
    shares = min(count, section.units)
    size, index = (section.stop - section.start) // shares, index * shares // count
    return section.start + index * size, section.start + (index + 1) * size
