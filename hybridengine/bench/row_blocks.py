"""Shards as rows: which rows a rank contributes to a gather, and which parts of them a destination needs.

A gather moves contiguous rows, not boxes. So a shard is its parameters one after the other, each a stack of rows; a
contribution is an interval of that, rounded to rows; and what arrives is cut afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybridengine.errors import PlanError
from hybridengine.reshard.boxes import Box, intersect, moved, subtract
from hybridengine.reshard.layout import LocalParameter, Piece, Shard


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of one local parameter, at an offset inside a contribution."""

    parameter: LocalParameter
    start: int
    stop: int
    offset: int
    """Elements of the contribution before this block."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.parameter.shape[1:])

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Cut:
    """A box of a contribution that fills a box of a destination parameter."""

    member: int
    """Whose contribution: place in the gather's group."""
    block: RowBlock
    source: Box
    """In indices of the block."""
    parameter: str
    destination: Box
    """In indices of the destination parameter."""


def contribution(shard: Shard, part: int, num_parts: int) -> tuple[RowBlock, ...]:
    """Part `part` of `num_parts` nearly equal parts of a shard; together they have every row once."""
    total = shard.num_elements
    low, high = total * part // num_parts, total * (part + 1) // num_parts
    blocks, before, offset = [], 0, 0
    for parameter in shard.parameters:
        rows, row = parameter.shape[0], parameter.num_elements // parameter.shape[0]
        # A row belongs to the part in which it starts.
        start, stop = (min(max(-(-(bound - before) // row), 0), rows) for bound in (low, high))
        if start < stop:
            blocks.append(RowBlock(parameter, start, stop, offset))
            offset += blocks[-1].num_elements
        before += parameter.num_elements
    return tuple(blocks)


def contribution_size(blocks: Sequence[RowBlock]) -> int:
    """Elements of a contribution."""
    return blocks[-1].offset + blocks[-1].num_elements if blocks else 0


class Cutter:
    """Cuts contributions to what a destination shard still lacks; an element that comes twice is taken once."""

    def __init__(self, destination: Shard) -> None:
        self._missing: dict[str, list[tuple[str, Piece, list[Box]]]] = {}
        for parameter in destination.parameters:
            for piece in parameter.pieces:
                self._missing.setdefault(piece.tensor, []).append((parameter.name, piece, [piece.box]))

    def cut(self, members: Sequence[Sequence[RowBlock]]) -> tuple[Cut, ...]:
        """Cuts of one gather, to which member i contributes `members[i]`."""
        return tuple(
            found
            for member, blocks in enumerate(members)
            for block in blocks
            for piece in block.parameter.pieces
            for found in self._cut_piece(member, block, piece)
        )

    def check_complete(self) -> None:
        """Check that the destination lacks nothing any more.

        Raises:
            PlanError: a box that no contribution held.
        """
        for tensor, needs in self._missing.items():
            for name, _, boxes in needs:
                if boxes:
                    raise PlanError(
                        f"{tensor}{list(boxes[0])}, which {name} needs, is in no contribution; the group that gathers"
                        " must hold a whole model"
                    )

    def _cut_piece(self, member: int, block: RowBlock, piece: Piece) -> Iterator[Cut]:
        rows = ((block.start, block.stop), *((0, size) for size in block.parameter.shape[1:]))
        local = intersect(piece.local_box, rows)
        if local is None:
            return
        held = piece.in_tensor(local)
        first_row = (block.start, *(0 for _ in block.parameter.shape[1:]))
        origin = tuple(0 for _ in first_row)
        for name, need, missing in self._missing.get(piece.tensor, ()):
            parts = [part for box in missing if (part := intersect(box, held)) is not None]
            missing[:] = [rest for box in missing for rest in subtract(box, held)]
            for part in parts:
                source = moved(piece.in_parameter(part), first_row, origin)
                yield Cut(member, block, source, name, need.in_parameter(part))
