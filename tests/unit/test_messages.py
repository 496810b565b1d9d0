"""Messages of plans: every move between ranks is packed once, and staged only if memory is not contiguous."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.layout import Layout, Shard, whole
from hybridengine.reshard.messages import joined, packed
from hybridengine.reshard.plan import Move, Pack, Place, Plan
from hybridengine.topology.links import NodeMap
from tests.unit.numpy_shards import small_shape
from tests.unit.plan_cases import FEW, GENERAL, Case, at, fitting_shape


def parameter_view(plan: Plan, place: Place, move: Move, in_destination: bool) -> np.ndarray:
    """Return the box of a move in an array of the shape of its parameter."""
    layout = plan.destination if in_destination else plan.source
    return np.empty(layout.shard(place.rank).by_name[place.parameter].shape, dtype=np.int8)[at(place, move)]


@pytest.mark.parametrize(("direct_elements", "ranks_per_node"), [(1, 8), (50, 2), (10**9, 4)])
@pytest.mark.parametrize("case", FEW + GENERAL, ids=str)
def test_messages_carry_every_remote_move_once(case: Case, direct_elements: int, ranks_per_node: int) -> None:
    """Boxes of at least `direct_elements` are not staged where numpy finds them contiguous; others share messages."""
    nodes = NodeMap.uniform(12, ranks_per_node)
    for plan in case.plans(nodes=nodes, direct_elements=direct_elements):
        for bucket in plan.buckets:
            remote = [move for move in bucket.moves if not move.is_local]
            carried = [move for pack in bucket.packs for moves in pack.moves for move in moves]
            assert Counter(map(repr, carried)) == Counter(map(repr, remote))
            packed = [
                (pack.step, move.source, move.tensor, move.box)
                for pack in bucket.packs
                for move in pack.moves[0]
            ]
            assert len(packed) == len(set(packed)), "a box is packed twice"
            for pack in bucket.packs:
                assert pack.source_rank not in pack.receivers
                assert len({tuple(move.source for move in moves) for moves in pack.moves}) == 1
                assert {move.source.rank for move in pack.moves[0]} == {pack.source_rank}
                assert {move.step for moves in pack.moves for move in moves} == {pack.step}
                for receiver in pack.receivers:
                    moves = pack.moves_to(receiver)
                    assert {move.destination.rank for move in moves} == {receiver}
                    assert sum(move.num_elements for move in moves) == pack.num_elements
            for rank in plan.ranks:
                assert [m for m in bucket.moves if m.is_local and m.source.rank == rank] == bucket.local(rank)
            shared: Counter[object] = Counter()
            for pack in bucket.packs:
                large = all(move.num_elements >= direct_elements for move in pack.moves[0])
                if len(pack.moves[0]) == 1 and large:
                    (first,) = pack.moves[0]
                    sent = parameter_view(plan, first.source, first, in_destination=pack.step == 1)
                    assert pack.sent_in_place == sent.flags.c_contiguous
                    for (move,), in_place in zip(pack.moves, pack.received_in_place, strict=True):
                        view = parameter_view(plan, move.destination, move, in_destination=True)
                        assert in_place == view.flags.c_contiguous
                else:
                    assert not pack.sent_in_place and not any(pack.received_in_place)
                if not pack.sent_in_place and not any(pack.received_in_place):
                    shared[pack.step, pack.source_rank, pack.receivers] += 1
            assert all(count == 1 for count in shared.values()), "two staged messages could be one"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_one_run_of_memory_is_what_numpy_says(sizes: list[int], data: st.DataObject) -> None:
    shape = small_shape(layers=1)
    starts = [data.draw(st.integers(0, size - 1)) for size in sizes]
    stops = [data.draw(st.integers(start + 1, size)) for start, size in zip(starts, sizes, strict=True)]
    box = tuple(zip(starts, stops, strict=True))
    layout = Layout(shape, {0: (), 1: ()}, {(): Shard((whole("p", "t", tuple(sizes)),))}, kind="whole")
    move = Move("t", box, Place(0, "p", tuple(starts)), Place(1, "p", tuple(starts)))
    view = np.empty(sizes, dtype=np.int8)[tuple(slice(a, b) for a, b in box)]
    (pack,) = packed([move], layout, layout, direct_elements=1)
    assert pack.sent_in_place == view.flags.c_contiguous
    assert pack.received_in_place == (view.flags.c_contiguous,)
    (pack,) = packed([move], layout, layout, direct_elements=math.prod(view.shape) + 1)
    assert not pack.sent_in_place and pack.received_in_place == (False,)


def test_joined_messages_keep_the_order_of_their_boxes_for_every_receiver() -> None:
    """The order in which the sender writes is the order in which each receiver reads."""

    def pack(tensor: str, receivers: tuple[int, ...], in_place: bool = False) -> Pack:
        box = ((0, 2),)
        moves = tuple(
            (Move(tensor, box, Place(0, "p", (0,)), Place(rank, tensor, (0,))),) for rank in receivers
        )
        return Pack(0, 0, receivers, moves, 2, in_place, (False,) * len(receivers))

    packs = [
        pack("a", (1, 2)),
        pack("b", (1, 2)),
        pack("c", (2,)),
        pack("d", (1, 2), True),
        pack("e", (1, 2)),
    ]
    first, second, third = joined(packs)
    assert first == packs[3]
    assert (second.receivers, second.num_elements) == ((1, 2), 6)
    for rank in (1, 2):
        assert [move.tensor for move in second.moves_to(rank)] == ["a", "b", "e"]
        assert {move.destination.rank for move in second.moves_to(rank)} == {rank}
    assert third == packs[2]


def test_two_parameters_of_a_rank_that_hold_one_tensor_both_arrive() -> None:
    shape = small_shape(layers=1)
    name, size = "model.norm.weight", (6,)
    twice = Shard((whole("first", name, size), whole("second", name, size)))
    source = Layout(shape, {0: (0,)}, {(0,): Shard((whole("norm", name, size),))}, kind="one")
    plan = compile_plan(source, Layout(shape, {1: (0,)}, {(0,): twice}, kind="two"), (0, 1))
    (bucket,) = (bucket for bucket in plan.buckets if name in bucket.tensors)
    filled = {
        move.destination.parameter
        for pack in bucket.packs
        for moves in pack.moves
        for move in moves
        if move.destination.rank == 1
    }
    assert filled == {"first", "second"}


def test_no_rank_packs_an_element_twice() -> None:
    (plan,) = Case(fitting_shape("llama", False, 2, 4), "2-4-1", "1-1").plans()
    for rank in plan.ranks:
        sources = [
            (pack.moves[0][index].tensor, pack.moves[0][index].box)
            for bucket in plan.buckets
            for pack in bucket.packs
            if pack.source_rank == rank
            for index in range(len(pack.moves[0]))
        ]
        assert len(sources) == len(set(sources)) > 0
