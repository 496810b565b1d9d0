"""Ranges of flattened parameters, compared with numpy's numbering of elements."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.reshard.boxes import Box
from hybridengine.reshard.flat_ranges import boxes_in_range, pieces_in_range
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from tests.unit.numpy_shards import cut_shard, numbered, small_shape

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    size = math.prod(shape)
    start = draw(st.integers(0, size))
    return shape, start, draw(st.integers(start, size))


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


@given(ranges())
def test_boxes_of_a_range_cover_its_elements_once_and_in_order(case: tuple[tuple[int, ...], int, int]):
    shape, start, stop = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    found = [numbers[at(box)].flatten().tolist() for box in boxes_in_range(shape, start, stop)]
    assert all(found), "no box is empty"
    assert [number for one in found for number in one] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("sizes", ["2-2-1", "1-4-1"])
@settings(max_examples=12)
@given(cuts=st.lists(st.floats(0, 1), max_size=4).map(sorted))
def test_ranges_of_every_parameter_find_its_elements_in_the_logical_tensors(sizes: str, cuts: list[float]):
    """Fused, interleaved, padded and replicated parameters, cut anywhere: each element is where its range says."""
    shape = small_shape("qwen2", tied=False, vocab=131, layers=2)
    tensors, layout = numbered(shape), megatron_layout(shape, Grid(TrainSizes.parse(sizes)))
    for rank in layout.keys:
        shard = layout.shard(rank)
        local = cut_shard(shard, tensors)
        for parameter in shard.parameters:
            size = parameter.num_elements
            bounds = [0, *(round(cut * size) for cut in cuts), size]
            for start, stop in pairwise(bounds):
                flat = local[parameter.name].reshape(-1)[start:stop]
                seen = np.zeros(len(flat), dtype=int)
                for piece in pieces_in_range(parameter, start, stop):
                    item = flat.itemsize
                    view = np.lib.stride_tricks.as_strided(
                        flat[piece.offset :], piece.shape, [item * stride for stride in piece.strides]
                    )
                    assert np.array_equal(view, tensors[piece.tensor][at(piece.box)])
                    places = np.lib.stride_tricks.as_strided(
                        np.arange(len(flat))[piece.offset :],
                        piece.shape,
                        [8 * stride for stride in piece.strides],
                    )
                    seen[places] += 1
                padding = parameter.num_elements - sum(
                    math.prod(b - a for a, b in p.box) for p in parameter.pieces
                )
                assert seen.max(initial=0) <= 1
                assert (seen == 0).sum() <= padding
