"""Boxes compared with masks in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.reshard.boxes import (
    Box,
    extents,
    full_box,
    intersect,
    moved,
    num_elements,
    starts,
    subtract,
)

SIDE = 6


@st.composite
def boxes(draw: st.DrawFn, ndim: int) -> Box:
    """Draw a box with at least one element inside a cube of `SIDE`."""
    box = []
    for _ in range(ndim):
        start = draw(st.integers(0, SIDE - 1))
        box.append((start, draw(st.integers(start + 1, SIDE))))
    return tuple(box)


pairs = st.integers(1, 4).flatmap(lambda ndim: st.tuples(boxes(ndim), boxes(ndim)))


def mask(box: Box) -> np.ndarray:
    found = np.zeros((SIDE,) * len(box), dtype=np.int64)
    found[tuple(slice(start, stop) for start, stop in box)] = 1
    return found


@given(pairs)
@settings(max_examples=100, deadline=None)
def test_intersect_is_the_and_of_the_masks(pair: tuple[Box, Box]) -> None:
    one, other = pair
    common = intersect(one, other)
    expected = mask(one) & mask(other)
    assert np.array_equal(np.zeros_like(expected) if common is None else mask(common), expected)
    assert (common is None) == (not expected.any())
    assert intersect(other, one) == common


@given(pairs)
@settings(max_examples=100, deadline=None)
def test_subtract_covers_the_difference_once(pair: tuple[Box, Box]) -> None:
    box, hole = pair
    parts = subtract(box, hole)
    covered = sum((mask(part) for part in parts), np.zeros((SIDE,) * len(box), dtype=np.int64))
    assert np.array_equal(covered, mask(box) * (1 - mask(hole)))
    assert all(num_elements(part) > 0 for part in parts)
    assert len(parts) <= 2 * len(box)


@given(st.integers(1, 4).flatmap(boxes))
@settings(max_examples=50, deadline=None)
def test_sizes_are_those_of_the_mask(box: Box) -> None:
    selected = np.arange(SIDE ** len(box)).reshape((SIDE,) * len(box))[tuple(slice(a, b) for a, b in box)]
    assert extents(box) == selected.shape
    assert num_elements(box) == selected.size == mask(box).sum()
    first = np.unravel_index(selected.ravel()[0], (SIDE,) * len(box))
    assert starts(box) == tuple(int(index) for index in first)
    assert subtract(box, box) == []


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n), boxes(n))))
@settings(max_examples=50, deadline=None)
def test_moved_keeps_elements_at_their_distance_from_the_origin(triple: tuple[Box, Box, Box]) -> None:
    box, origins, targets = triple
    origin, target = starts(origins), starts(targets)
    there = moved(box, origin, target)
    assert extents(there) == extents(box)
    distance = np.subtract(starts(box), origin)
    assert np.array_equal(np.subtract(starts(there), target), distance)
    assert moved(there, target, origin) == box


def test_boxes_of_no_dimension_and_of_no_element() -> None:
    assert full_box((2, 3)) == ((0, 2), (0, 3))
    assert num_elements(full_box((0, 3))) == 0
    assert full_box(()) == () and num_elements(()) == 1
    assert intersect(((0, 2),), ((2, 4),)) is None  # half-open: neighbours have nothing in common


def test_boxes_of_different_dimensions_do_not_mix() -> None:
    with pytest.raises(ValueError):
        intersect(((0, 1),), ((0, 1), (0, 1)))
    with pytest.raises(ValueError):
        moved(((0, 1),), (0,), (0, 0))
