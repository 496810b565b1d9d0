"""Costs of plans against table 2 of the paper, their buckets against the bound, their messages against the moves."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from hybridengine.model_shapes import ModelShape
from hybridengine.reshard.cost import rank_cost
from hybridengine.reshard.hf import hf_layout
from hybridengine.reshard.layout import Layout, Shard, whole
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.planner import compile_plan, fused_groups, inverse_local
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from tests.unit.numpy_shards import small_shape
from tests.unit.plan_cases import CASES, FEW, FLOAT32, Case, elements, fitting_shape


@pytest.mark.parametrize("bucket_elements", [1, 400, 10**9])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_costs_are_within_zero_redundancy(case: Case, bucket_elements: int) -> None:
    for plan in case.plans(bucket_elements):
        there = {rank: rank_cost(plan, rank, FLOAT32) for rank in plan.ranks}
        assert sum(cost.sent_bytes for cost in there.values()) == sum(
            cost.received_bytes for cost in there.values()
        )
        for rank, cost in there.items():
            training = sum(values.size for values in case.training(rank).values()) * FLOAT32
            generating = sum(values.size for values in case.generating(rank).values()) * FLOAT32
            assert (cost.source_bytes, cost.destination_bytes) == (training, generating)
            largest = max(
                sum(case.generating(rank)[name].size for name in bucket.destinations[rank])
                for bucket in plan.buckets
            )
            assert cost.bucket_bytes == largest * FLOAT32
            assert cost.peak_bound_bytes == max(training, generating) + cost.bucket_bytes
            assert max(training, generating) <= cost.peak_bytes <= cost.peak_bound_bytes
            back = rank_cost(inverse_local(plan), rank, FLOAT32)
            assert (back.received_bytes, back.sent_bytes) == (0, 0)
            assert (back.source_bytes, back.destination_bytes) == (generating, training)
            assert max(training, generating) <= back.peak_bytes <= back.peak_bound_bytes


def test_peak_of_one_bucket_counts_both_shards_and_the_arriving_bytes() -> None:
    """1-2-1 -> 1-1 in one bucket: the half that is held, the whole that appears, the half that arrives."""
    case = Case(fitting_shape("llama", False, 1, 2), "1-2-1", "1-1")
    (plan,) = case.plans(10**9)
    assert len(plan.buckets) == 1
    for rank in (0, 1):
        held, appears = (
            sum(values.size for values in local.values())
            for local in (case.training(rank), case.generating(rank))
        )
        arrives = len(np.setdiff1d(elements(case.generating(rank)), elements(case.training(rank))))
        assert rank_cost(plan, rank, 1).peak_bytes == held + arrives + appears


def replica_received(case: Case) -> int:
    """Elements received by all ranks of the first training replica."""
    replica = case.grid.groups("pp", "tp")[0]
    return sum(
        rank_cost(plan, rank, 1).received_bytes
        for plan in case.plans()
        for rank in plan.ranks
        if rank in replica
    )


def table_2_total(case: Case) -> int:
    """Elements a replica receives by table 2, times p·t: (d_g - 1)·M for what is sharded.

    Two things are held more often than the table's M knows: norms, by all t ranks of a stage, so that they travel
    between stages only; and a tied embedding, by the first and by the last stage.
    """
    shape, sizes, gen = case.shape, case.grid.sizes, case.generation.sizes
    p, t, p_g, t_g = sizes.pp_size, sizes.tp_size, gen.pp_size, gen.tp_size
    norms = sum(math.prod(size) for name, size in shape.tensors.items() if "norm" in name)
    tied = shape.vocab_size * shape.hidden_size if shape.tied_embeddings else 0
    sharded = shape.num_parameters - norms - tied
    joined = p // p_g * t // t_g  # ranks that hold one generation shard
    if p_g > 1:
        embedding = 2 * (joined - 1)
    else:
        embedding = joined - (2 if p > 1 else 1)
    return (joined - 1) * sharded + (p // p_g - 1) * t * norms + embedding * tied


@pytest.mark.parametrize("case", CASES + FEW, ids=str)
def test_received_bytes_are_those_of_table_2(case: Case) -> None:
    assert replica_received(case) == table_2_total(case)


@pytest.mark.parametrize(
    ("train", "gen", "fraction"), [("1-4-2", "1-2", 1 / 4), ("2-4-1", "1-2", 3 / 8), ("2-2-1", "1-1", 3 / 4)]
)
def test_mean_received_bytes_approach_the_fraction_of_the_paper(
    train: str, gen: str, fraction: float
) -> None:
    """(d_g - 1)/(tp)·M per rank: exact but for the norms, which are 1 in 400 of these weights."""
    sizes = TrainSizes.parse(train)
    shape = ModelShape("llama", 2, 96, 384, 8, 8, 12, 1000, 64)
    case = Case(shape, train, gen)
    mean = replica_received(case) / sizes.model_parallel_size
    assert mean / shape.num_parameters == pytest.approx(fraction, rel=0.005)


@pytest.mark.parametrize("bucket_elements", [1, 150, 400, 3000])
@pytest.mark.parametrize("case", FEW[::3], ids=str)
def test_buckets_are_bounded_and_hold_every_tensor_once(case: Case, bucket_elements: int) -> None:
    for plan in case.plans(bucket_elements):
        assert sorted(name for bucket in plan.buckets for name in bucket.tensors) == sorted(
            case.shape.tensors
        )
        groups = fused_groups(plan.source, plan.destination)
        for bucket in plan.buckets:
            assert all(
                set(group) <= set(bucket.tensors) or not set(group) & set(bucket.tensors) for group in groups
            )
            assert {move.tensor for move in bucket.moves} <= set(bucket.tensors)
            if len([group for group in groups if set(group) <= set(bucket.tensors)]) > 1:
                for rank in plan.ranks:
                    local = case.generating(rank)
                    assert sum(local[name].size for name in bucket.destinations[rank]) <= bucket_elements
        for one, following in pairwise(plan.buckets):  # none is closed too early
            added = next(group for group in groups if following.tensors[0] in group)
            sizes = []
            for rank in plan.ranks:
                parameters = plan.destination.shard(rank).parameters
                fits = {*one.tensors, *added}
                sizes.append(
                    sum(q.num_elements for q in parameters if q.pieces and q.pieces[0].tensor in fits)
                )
            assert max(sizes) > bucket_elements


@pytest.mark.parametrize("case", FEW, ids=str)
def test_messages_carry_every_remote_move_once(case: Case) -> None:
    for plan in case.plans():
        for bucket in plan.buckets:
            remote = [move for move in bucket.moves if not move.is_local]
            carried = [move for pack in bucket.packs for moves in pack.moves for move in moves]
            assert Counter(map(repr, carried)) == Counter(map(repr, remote))
            packed = [
                (pack.source_rank, move.source.parameter, move.tensor, move.box)
                for pack in bucket.packs
                for move in pack.moves[0]
            ]
            assert len(packed) == len(set(packed)), "a box is packed twice"
            for pack in bucket.packs:
                assert pack.source_rank not in pack.receivers
                assert len({tuple(move.source for move in moves) for moves in pack.moves}) == 1
                for receiver in pack.receivers:
                    moves = pack.moves_to(receiver)
                    assert {move.destination.rank for move in moves} == {receiver}
                    assert sum(move.num_elements for move in moves) == pack.num_elements
            for rank in plan.ranks:
                assert bucket.sends(rank) == [pack for pack in bucket.packs if pack.source_rank == rank]
                assert bucket.receives(rank) == [pack for pack in bucket.packs if rank in pack.receivers]
                assert [m for m in bucket.moves if m.is_local and m.source.rank == rank] == bucket.local(rank)


def test_two_parameters_of_a_rank_that_hold_one_tensor_both_arrive() -> None:
    shape = small_shape(layers=1)
    name, size = "model.norm.weight", (6,)
    twice = Shard((whole("first", name, size), whole("second", name, size)))
    source = Layout(shape, {0: (0,)}, {(0,): Shard((whole("norm", name, size),))}, kind="one")
    plan = compile_plan(source, Layout(shape, {1: (0,)}, {(0,): twice}, kind="two"), (0, 1))
    (bucket,) = (bucket for bucket in plan.buckets if name in bucket.tensors)
    filled = {
        move.destination.parameter
        for pack in bucket.receives(1)
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
            for pack in bucket.sends(rank)
            for index in range(len(pack.moves[0]))
        ]
        assert len(sources) == len(set(sources)) > 0


def test_replicas_share_the_sending() -> None:
    """Four replicas of a model and one rank without: each replica sends a quarter, but for the largest tensor."""
    shape = fitting_shape("llama", False, 1, 2)
    plan = compile_plan(megatron_layout(shape, Grid(TrainSizes(1, 1, 4))), hf_layout(shape, (4,)), range(5))
    sent = [rank_cost(plan, rank, 1).sent_bytes for rank in range(5)]
    assert sum(sent) == shape.num_parameters and sent[4] == 0
    assert max(sent[:4]) - min(sent[:4]) <= max(math.prod(size) for size in shape.tensors.values())
