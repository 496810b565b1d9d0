"""Rows that a rank contributes to a gather, and the parts of them that a destination needs.

A gather moves contiguous rows, not boxes. A shard is therefore treated as its parameters in sequence, each a stack of
rows. A contribution is an interval of that sequence, rounded to rows, and gathered rows are cut afterwards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hybridengine.errors import PlanError
from hybridengine.reshard.boxes import Box, cover, intersect, moved, starts
from hybridengine.reshard.layout import LocalParameter, Piece, Shard


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of one local parameter, as part of a member's contribution to a bucket."""

    bucket: int
    member: int
    """Index of the contributing rank in the gather's group."""
    parameter: LocalParameter
    start: int
    stop: int
    offset: int
    """Number of elements of the contribution before this block."""

    @property
    def box(self) -> Box:
        """Box of the rows in the local parameter."""
        return ((self.start, self.stop), *((0, size) for size in self.parameter.shape[1:]))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.parameter.shape[1:])

    @property
    def end(self) -> int:
        """Number of elements of the contribution up to the end of this block."""
        return self.offset + math.prod(self.shape)


@dataclass(frozen=True)
class Cut:
    """Box of a block that fills a box of a destination parameter."""

    block: RowBlock
    source: Box
    """Box in indices of the block."""
    parameter: str
    destination: Box
    """Box in indices of the destination parameter."""


def row_blocks(shard: Shard, member: int, part: int, num_parts: int, num_buckets: int) -> Iterator[RowBlock]:
    """Yield the blocks of part `part` of `num_parts` nearly equal parts of a shard, in nearly equal buckets.

    Every row is in exactly one part.
    """
    total, num_pieces = shard.num_elements, num_parts * num_buckets
    for bucket in range(num_buckets):
        piece = part * num_buckets + bucket
        bounds = total * piece // num_pieces, total * (piece + 1) // num_pieces
        before, offset = 0, 0
        for parameter in shard.parameters:
            rows, row = parameter.shape[0], parameter.num_elements // parameter.shape[0]
            # A row belongs to the piece in which it starts.
            start, stop = (min(max(-(-(bound - before) // row), 0), rows) for bound in bounds)
            if start < stop:
                block = RowBlock(bucket, member, parameter, start, stop, offset)
                offset = block.end
                yield block
            before += parameter.num_elements


def cuts(destination: Shard, blocks: Iterable[RowBlock]) -> Iterator[Cut]:
    """Yield the cuts that fill a shard; an element that is in two blocks is taken once.

    Raises:
        PlanError: a needed box is in no block.
    """
    held: dict[str, list[tuple[tuple[RowBlock, Piece], Box]]] = defaultdict(list)
    for block in blocks:
        for piece in block.parameter.pieces:
            if (local := intersect(piece.local_box, block.box)) is not None:
                held[piece.tensor].append(((block, piece), piece.in_tensor(local)))
    for parameter in destination.parameters:
        for need in parameter.pieces:
            found, missing = cover(need.box, held[need.tensor])
            if missing:
                raise PlanError(
                    f"{need.tensor}{list(missing[0])}, which {parameter.name} needs, is in no contribution; the group"
                    " that gathers must hold a whole model"
                )
            for (block, piece), box in found:
                origin = (0,) * len(block.shape)
                source = moved(piece.in_parameter(box), starts(block.box), origin)
                yield Cut(block, source, parameter.name, need.in_parameter(box))
