"""Boxes: half-open n-dimensional intervals of a tensor, written as one (start, stop) pair per dimension."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeVar

Box = tuple[tuple[int, int], ...]
Holder = TypeVar("Holder")


@lru_cache(maxsize=4096)
def full_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a whole tensor of `shape`."""
    return tuple([(0, size) for size in shape])


def extents(box: Box) -> tuple[int, ...]:
    """Return the size of the box along each dimension."""
    return tuple(stop - start for start, stop in box)


def num_elements(box: Box) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def starts(box: Box) -> tuple[int, ...]:
    return tuple(start for start, _ in box)


def intersect(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    common = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = a if a > c else c, b if b < d else d
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that cover the elements of `box` outside `hole`."""
    common = intersect(box, hole)
    if common is None:
        return [box]
    rest, core = [], list(box)
    for dim, ((start, stop), (inner_start, inner_stop)) in enumerate(zip(box, common, strict=True)):
        for part in ((start, inner_start), (inner_stop, stop)):
            if part[0] < part[1]:
                rest.append((*core[:dim], part, *core[dim + 1 :]))
        core[dim] = (inner_start, inner_stop)
    return rest


def cover(box: Box, held: Iterable[tuple[Holder, Box]]) -> tuple[list[tuple[Holder, Box]], list[Box]]:
    """Return (holder, part of `box`), each element from its first holder, and the boxes that no holder has."""
    found: list[tuple[Holder, Box]] = []
    missing = [box]
    for holder, other in held:
        rest: list[Box] = []
        for one in missing:
            part = intersect(one, other)
            if part is None:
                rest.append(one)
                continue
            found.append((holder, part))
            if part != one:
                rest += subtract(one, part)
        missing = rest
    return found, missing


def view_index(offset: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the index of the box of `sizes` at `offset`."""
    return tuple([slice(start, start + size) for start, size in zip(offset, sizes, strict=True)])


def moved(box: Box, origin: tuple[int, ...], target: tuple[int, ...]) -> Box:
    """Return `box` translated so that the point `origin` moves to `target`."""
    return tuple(
        (start - o + t, stop - o + t) for (start, stop), o, t in zip(box, origin, target, strict=True)
    )
