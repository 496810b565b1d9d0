"""Pieces that place a 2-d tensor in a 3-d parameter: layouts, plans there and back, audit, costs and ranges."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from hybridengine.reshard.audit import audit, audit_return
from hybridengine.reshard.compiler import compile_plan, inverse_local
from hybridengine.reshard.cost import plan_costs
from hybridengine.reshard.flat_ranges import pieces_in_range
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from tests.unit.numpy_shards import assert_same, cut_shard, megatron_reference, numbered, small_shape
from tests.unit.plan_cases import elements, execute
from tests.unit.stacked_layers import KINDS, stacked_layout, stacked_reference

SHAPE = small_shape(layers=4, vocab=128)
GRID = Grid(TrainSizes(2, 2, 1))
RANKS = range(4)


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_equal_stacks_made_in_numpy(kind: str) -> None:
    layout, tensors = stacked_layout(SHAPE, kind, 4), numbered(SHAPE)
    for rank in RANKS:
        found = cut_shard(layout.shard(rank), tensors)
        assert found["w13"].ndim == found["w2"].ndim == 3
        assert_same(found, stacked_reference(SHAPE, tensors, kind, rank), f"rank {rank}")


@pytest.mark.parametrize("direct_elements", [1, 10**9], ids=["in place", "staged"])
@pytest.mark.parametrize("kind", KINDS)
def test_plans_fill_stacks_and_cut_training_shards_out_of_them(kind: str, direct_elements: int) -> None:
    tensors = numbered(SHAPE)
    source, destination = megatron_layout(SHAPE, GRID), stacked_layout(SHAPE, kind, 4)
    plan = compile_plan(source, destination, RANKS, 300, direct_elements=direct_elements)
    back = inverse_local(plan)
    assert (audit(plan), audit_return(plan, back)) == ([], [])
    in_stacks = [
        move.destination.parameter in ("w13", "w2")
        for bucket in plan.buckets
        for pack in bucket.packs
        for move, in_place in zip((moves[0] for moves in pack.moves), pack.received_in_place, strict=True)
        if in_place
    ]
    assert any(in_stacks) == (direct_elements == 1)

    places = [GRID.coordinate(rank) for rank in RANKS]
    training = {
        rank: megatron_reference(SHAPE, tensors, place.pp_rank, 2, place.tp_rank, 2)
        for rank, place in zip(RANKS, places, strict=True)
    }
    costs = plan_costs(plan, 1)
    for rank in RANKS:
        needed = elements(stacked_reference(SHAPE, tensors, kind, rank))
        assert costs[rank].received_bytes == len(np.setdiff1d(needed, elements(training[rank])))
    held = {rank: dict(local) for rank, local in training.items()}
    made = execute(plan, held)
    for rank in RANKS:
        assert_same(made[rank], stacked_reference(SHAPE, tensors, kind, rank), f"rank {rank}")
        assert sorted(held[rank]) == sorted(plan.retained(rank))
        # With half of the layers each, ranks 1 and 2 lack the rows of the layers that they train.
        assert bool(held[rank]) == (kind == "layers" and rank in (1, 2))
    restored = execute(back, made)
    for rank in RANKS:
        assert_same({**held[rank], **restored[rank]}, training[rank], f"rank {rank}")


def test_the_audit_finds_a_tensor_in_the_wrong_place_of_a_stack() -> None:
    plan = compile_plan(megatron_layout(SHAPE, GRID), stacked_layout(SHAPE, "rows", 4), RANKS)
    number, bucket = next((i, b) for i, b in enumerate(plan.buckets) if "w2" in b.destinations[0])
    move = next(move for move in bucket.moves if move.is_local and move.destination.parameter == "w2")
    layer, *inside = move.destination.offset
    wrong = move._replace(destination=move.destination._replace(offset=(layer ^ 1, *inside)))
    moves = tuple(wrong if one is move else one for one in bucket.moves)
    buckets = (*plan.buckets[:number], replace(bucket, moves=moves), *plan.buckets[number + 1 :])
    assert any(
        "writes what does not belong there" in problem for problem in audit(replace(plan, buckets=buckets))
    )


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_ranges_of_stacks_find_their_elements_in_the_logical_tensors(name: str) -> None:
    """A distributed optimizer cuts them into parts of a row, whole rows and whole layers."""
    tensors = numbered(SHAPE)
    parameter = stacked_layout(SHAPE, "rows", 4).shard(1).by_name[name]
    flat = stacked_reference(SHAPE, tensors, "rows", 1)[name].reshape(-1)
    for start, stop in pairwise([0, 3, 50, 51, 130, len(flat) - 5, len(flat)]):
        found = np.zeros(stop - start, dtype=np.int64)
        for piece in pieces_in_range(parameter, start, stop):
            box = tensors[piece.tensor][tuple(slice(a, b) for a, b in piece.box)]
            places = piece.offset + sum(
                np.expand_dims(np.arange(size) * stride, tuple(range(1, len(piece.shape) - dim)))
                for dim, (size, stride) in enumerate(zip(piece.shape, piece.strides, strict=True))
            )
            assert not found[places].any()
            found[places] = box
        assert np.array_equal(found, flat[start:stop])
