"""Conversion of ranges of a parameter's elements, counted row by row, to boxes.

A distributed optimizer gives every replica a range [start, stop) of each parameter's elements. Such a range consists of
a few boxes: part of a row, whole rows, part of a row, and likewise in each further dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hybridengine.reshard.boxes import Box, extents, full_box, intersect, starts
from hybridengine.reshard.layout import LocalParameter


@dataclass(frozen=True)
class RangePiece:
    """A box of a logical tensor, and its position in a range of a local parameter's elements."""

    tensor: str
    box: Box
    offset: int
    """Index of the box's first element in the range."""
    strides: tuple[int, ...]
    """Elements between neighbours in each dimension, both in the range and in the whole parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        return extents(self.box)


def boxes_in_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return disjoint boxes that cover the elements [start, stop) of a tensor of `shape`, counted row by row."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    inner = shape[1:]

    def in_row(number: int, begin: int, end: int) -> list[Box]:
        return [((number, number + 1), *box) for box in boxes_in_range(inner, begin, end)]

    if first == last:
        return in_row(first, head, tail)
    found = in_row(first, head, row) if head else []
    first += head > 0
    if first < last:
        found.append(((first, last), *full_box(inner)))
    return [*found, *in_row(last, 0, tail)]


def pieces_in_range(parameter: LocalParameter, start: int, stop: int) -> Iterator[RangePiece]:
    """Yield the pieces of logical tensors in elements [start, stop) of a local parameter, without padding."""
    strides = row_strides(parameter.shape)
    for inside in boxes_in_range(parameter.shape, start, stop):
        for piece in parameter.pieces:
            common = intersect(inside, piece.local_box)
            if common is None:
                continue
            first = sum(index * stride for index, stride in zip(starts(common), strides, strict=True))
            box = piece.in_tensor(common)
            yield RangePiece(piece.tensor, box, first - start, strides)


def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
