"""Costs of plans, compared with small cases by hand and with table 2 of the paper; buckets compared with their bounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest

from hybridengine.families.family import is_float32
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.alike import fused_groups
from hybridengine.reshard.compiler import compile_plan, inverse_local
from hybridengine.reshard.cost import RankCost, plan_costs, plan_traffic
from hybridengine.reshard.layout import Layout, Shard, row_stack, whole
from hybridengine.reshard.plan import Bucket, Plan
from hybridengine.topology.generation import Grouping
from hybridengine.topology.links import LinkClass, NodeMap
from hybridengine.topology.sizes import TrainSizes
from tests.unit.numpy_shards import is_replicated, numbered, small_shape
from tests.unit.plan_cases import (
    CASES,
    FEW,
    FLOAT32,
    GENERAL,
    Case,
    elements,
    fitting_shape,
    peak_bound,
    sent_bytes,
    staged,
)


def in_flight(case: Case, plan: Plan, rank: int) -> int:
    """Return the most elements of messages and of generation parameters in the buckets that are open together."""
    generating = case.generating(rank)
    sizes = [
        staged(bucket, rank) + sum(generating[name].size for name in bucket.destinations[rank])
        for bucket in plan.buckets
    ]
    together = [
        one + other
        for one, other, bucket in zip(sizes, sizes[1:], plan.buckets[1:], strict=False)
        if bucket.overlaps
    ]
    return max(sizes + together)


@pytest.mark.parametrize("direct_elements", [1, 10**9])
@pytest.mark.parametrize("bucket_elements", [1, 400, 4000, 10**9])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_costs_are_within_zero_redundancy(case: Case, bucket_elements: int, direct_elements: int) -> None:
    for plan in case.plans(bucket_elements, direct_elements=direct_elements):
        there, returned = plan_costs(plan, FLOAT32), plan_costs(inverse_local(plan), FLOAT32)
        assert sum(sent_bytes(cost) for cost in there.values()) == sum(
            cost.received_bytes for cost in there.values()
        )
        for rank, cost in there.items():
            training = sum(values.size for values in case.training(rank).values()) * FLOAT32
            generating = sum(values.size for values in case.generating(rank).values()) * FLOAT32
            assert (cost.source_bytes, cost.destination_bytes) == (training, generating)
            assert cost.bucket_bytes == in_flight(case, plan, rank) * FLOAT32
            assert peak_bound(cost) == max(training, generating) + cost.bucket_bytes
            assert max(training, generating) <= cost.peak_bytes <= peak_bound(cost)
            back = returned[rank]
            assert (back.received_bytes, sent_bytes(back)) == (0, 0)
            assert (back.source_bytes, back.destination_bytes) == (generating, training)
            assert max(training, generating) <= back.peak_bytes <= min(peak_bound(back), cost.peak_bytes)
            assert peak_bound(back) == max(training, generating) + back.bucket_bytes


def test_peak_of_one_bucket_counts_both_shards_and_the_messages() -> None:
    """1-2-1 -> 1-1 in one bucket: the half that is held, the whole that appears, and the messages in both directions."""
    case = Case(fitting_shape("llama", False, 1, 2), "1-2-1", "1-1")
    (plan,) = case.plans(10**9)
    assert len(plan.buckets) == 1
    arrives = {
        rank: len(np.setdiff1d(elements(case.generating(rank)), elements(case.training(rank))))
        for rank in (0, 1)
    }
    for rank in (0, 1):
        held, appears = (
            sum(values.size for values in local.values())
            for local in (case.training(rank), case.generating(rank))
        )
        assert plan_costs(plan, 1)[rank].peak_bytes == held + appears + arrives[rank] + arrives[1 - rank]


def halves(direct_elements: int) -> Plan:
    """Rank 0 has rows 0 to 3 of 8 and the norm, rank 1 rows 4 to 7; both need all: buckets of 48 and 6 elements."""
    shape = small_shape(layers=1, vocab=8)
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    size, norm_size = shape.tensors[embedding], shape.tensors[norm]
    assert (size, norm_size) == ((8, 6), (6,))
    first = Shard((row_stack("rows", [(embedding, size, (0, 4))]), whole("norm", norm, norm_size)))
    second = Shard((row_stack("rows", [(embedding, size, (4, 8))]),))
    both = Shard((whole("embedding", embedding, size), whole("norm", norm, norm_size)))
    source = Layout(shape, {0: (0,), 1: (1,)}, {(0,): first, (1,): second}, kind="halves")
    destination = Layout(shape, {0: (), 1: ()}, {(): both}, kind="both")
    return compile_plan(source, destination, (0, 1), bucket_elements=1, direct_elements=direct_elements)


def test_costs_of_two_ranks_by_hand() -> None:
    plan = halves(direct_elements=10**9)
    one, other = plan_costs(plan, 2, NodeMap((1, 1))).values()
    assert one.received_by_link == {LinkClass.SAME_NODE: 0, LinkClass.BETWEEN_NODES: 2 * 24}
    assert other.received_by_link == {LinkClass.SAME_NODE: 0, LinkClass.BETWEEN_NODES: 2 * (24 + 6)}
    assert (one.sent_by_link, other.sent_by_link) == (other.received_by_link, one.received_by_link)
    assert plan_costs(plan, 2)[0].received_by_link == {LinkClass.SAME_NODE: 48, LinkClass.BETWEEN_NODES: 0}
    assert (one.copied_bytes, other.copied_bytes) == (2 * (24 + 6), 2 * 24)
    # The elements of 24 rows leave and 24 arrive, both through staging; then 6 leave rank 0 and arrive at rank 1.
    assert one.memory_bytes == tuple(2 * n for n in (30, 30 + 48 + 48, 54, 54 + 6 + 6, 54))
    assert other.memory_bytes == tuple(2 * n for n in (24, 24 + 48 + 48, 48, 48 + 6 + 6, 54))
    assert one.bucket_bytes == other.bucket_bytes == 2 * 96
    assert peak_bound(one) == peak_bound(other) == 2 * (54 + 96)
    back = plan_costs(inverse_local(plan), 2)
    assert back[0].memory_bytes == tuple(2 * n for n in (54, 54 + 6, 54, 54 + 24, 30))
    assert back[1].memory_bytes == tuple(2 * n for n in (54, 54, 48, 48 + 24, 24))
    traffic = plan_traffic(plan, NodeMap((1, 1)))
    # Either rank gathers into messages and scatters out of them, bucket by bucket.
    assert traffic.copied_KPR[:, :2].tolist() == [[[24, 24], [24, 24]], [[6, 0], [0, 6]]]
    assert traffic.messages_KLSR[0].sum(axis=0).tolist() == [[2, 2], [0, 0]]


def test_messages_in_place_and_overlap_by_hand() -> None:
    direct = plan_costs(halves(direct_elements=1), 1)  # rows are contiguous in memory: nothing is staged
    assert direct[0].memory_bytes == (30, 30 + 48, 54, 54 + 6, 54)
    assert direct[1].memory_bytes == (24, 24 + 48, 48, 48 + 6, 54)
    first, second = halves(direct_elements=10**9).buckets
    plan = dataclasses.replace(
        halves(direct_elements=10**9), buckets=(first, dataclasses.replace(second, overlaps=True))
    )
    together = plan_costs(plan, 1)  # the norm's bucket opens while the rows are still being unpacked
    assert together[0].memory_bytes == (30, 30 + 96, 30 + 96 + 12, 54 + 12, 54)
    assert together[1].memory_bytes == (24, 24 + 96, 24 + 96 + 12, 48 + 12, 54)
    assert together[0].bucket_bytes == together[1].bucket_bytes == 96 + 12


def by_rank(case: Case, bucket_elements: int = 400) -> list[RankCost]:
    """Return the costs of all ranks in elements, in the order of ranks."""
    costs = {rank: cost for plan in case.plans(bucket_elements) for rank, cost in plan_costs(plan, 1).items()}
    return [costs[rank] for rank in sorted(costs)]


def test_vanilla_grouping_costs_what_it_holds_twice() -> None:
    """1-4-2 -> 1-2: ranks 1 and 2 of a replica hold quarters that they do not generate with (figure 8 of the paper)."""
    shape = small_shape(layers=2, vocab=256, kv_heads=4)
    # q 16x6, k and v 8x6, o 6x16, gate and up 12x6, down 6x12 per layer; embedding and head 256x6; norms are not cut
    quarter = (2 * (96 + 48 + 48 + 96 + 3 * 72) + 2 * 1536) // 4
    assert quarter == 1020
    costs = by_rank(Case(shape, "1-4-2", "1-2", grouping=Grouping.VANILLA))
    assert [cost.received_bytes for cost in costs] == [1020, 2040, 2040, 1020] * 2
    assert [cost.redundant_bytes for cost in costs] == [0, 1020, 1020, 0] * 2
    assert [cost.extra_bytes for cost in costs] == [0, 1020, 1020, 0] * 2
    costs = by_rank(Case(shape, "1-4-2", "1-2"))
    assert {(cost.received_bytes, cost.redundant_bytes, cost.extra_bytes) for cost in costs} == {(1020, 0, 0)}


def test_wider_tensor_parallelism_costs_the_training_shard() -> None:
    """t = 2 -> t_g = 4 with two KV heads: half of the training shard belongs to the engine's, and all of it stays."""
    shape = small_shape(layers=2, vocab=128, kv_heads=2, heads_per_group=4)
    # Of the 456 of a layer without its norms, a rank trains 228 and generates with q 24, k 12, v 12, o 24, MLP 54: 126.
    layer, engine_layer, embedding, norms = 228, 126, 384, 12
    costs = by_rank(Case(shape, "1-2-2", "1-4"))
    retained = 2 * layer + 2 * embedding
    assert [cost.source_bytes for cost in costs] == [retained + 2 * norms + 6] * 4
    assert [cost.destination_bytes for cost in costs] == [2 * engine_layer + embedding + 2 * norms + 6] * 4
    assert {(cost.received_bytes, cost.extra_bytes, cost.redundant_bytes) for cost in costs} == {
        (0, 0, retained)
    }
    assert {cost.memory_bytes[-1] for cost in costs} == {retained + 2 * engine_layer + embedding + 30}
    # 2-2-1: a stage has one layer and either embedding or head; the other stage's half of the half arrives.
    costs = by_rank(Case(shape, "2-2-1", "1-4"))
    arrives = engine_layer + embedding // 2 + norms
    assert [cost.received_bytes for cost in costs] == [arrives + 6, arrives + 6, arrives, arrives]
    assert {cost.redundant_bytes for cost in costs} == {layer + embedding}
    # A rank has 102 of its layer and 192 of its embedding that it does not generate with, and receives as many others.
    assert {cost.extra_bytes for cost in costs} == {(layer - engine_layer) + embedding // 2}


@pytest.mark.parametrize("bucket_elements", [1, 400, 10**9])
@pytest.mark.parametrize("case", GENERAL, ids=str)
def test_memory_of_layouts_that_need_not_nest(case: Case, bucket_elements: int) -> None:
    """Retained parameters are held in both directions, in addition to one copy of everything else."""
    for plan in case.plans(bucket_elements):
        there, returned = plan_costs(plan, 1), plan_costs(inverse_local(plan), 1)
        for rank in plan.ranks:
            training, generating = (
                sum(values.size for values in local.values())
                for local in (case.training(rank), case.generating(rank))
            )
            retained = sum(case.training(rank)[name].size for name in plan.retained(rank))
            assert there[rank].redundant_bytes == returned[rank].redundant_bytes == retained
            assert (there[rank].memory_bytes[0], there[rank].memory_bytes[-1]) == (
                training,
                generating + retained,
            )
            assert (returned[rank].memory_bytes[0], returned[rank].memory_bytes[-1]) == (
                generating + retained,
                training,
            )
            assert there[rank].peak_bytes <= peak_bound(there[rank])
            assert returned[rank].peak_bytes <= peak_bound(returned[rank])
            assert returned[rank].peak_bytes <= there[rank].peak_bytes


def replica_received(case: Case) -> int:
    """Return the elements received by all ranks of the first training replica."""
    replica = case.grid.groups("pp", "tp")[0]
    return sum(
        cost.received_bytes
        for plan in case.plans()
        for rank, cost in plan_costs(plan, 1).items()
        if rank in replica
    )


def table_2_total(case: Case) -> int:
    """Return the elements that a replica receives by table 2, times p·t: (d_g - 1)·M for sharded tensors.

    Two kinds of tensors have more copies than the table's M assumes: norms and routers, on all t ranks of a stage, which
    travel between stages only; and a tied embedding, on the first and on the last stage.
    """
    shape, sizes, gen = case.shape, case.grid.sizes, case.generation.sizes
    p, t, p_g, t_g = sizes.pp_size, sizes.tp_size, gen.pp_size, gen.tp_size
    norms = sum(math.prod(size) for name, size in shape.tensors.items() if is_replicated(name))
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
    """(d_g - 1)/(tp)·M per rank, exact up to the norms, which are 1 in 400 of these weights."""
    sizes = TrainSizes.parse(train)
    shape = ModelShape("llama", 2, 96, 384, 8, 8, 12, 1000, 64)
    case = Case(shape, train, gen)
    mean = replica_received(case) / sizes.model_parallel_size
    assert mean / shape.num_parameters == pytest.approx(fraction, rel=0.005)


class GroupSizes:
    """Sizes of any set of fused tensors of a plan, rank by rank."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._packs = tuple(pack for bucket in plan.buckets for pack in bucket.packs)
        shards = [layout.shard(rank) for layout in (plan.source, plan.destination) for rank in plan.ranks]
        self.groups = [group.tensors for group in fused_groups(shards)]

    def of(self, tensors: Iterable[str], rank: int) -> tuple[int, int, int]:
        """Return elements filled, elements given up, and elements of staged messages."""
        names = set(tensors)
        filled, given_up = (
            sum(
                q.num_elements
                for q in layout.shard(rank).parameters
                if q.pieces and q.pieces[0].tensor in names
            )
            for layout in (self._plan.destination, self._plan.source)
        )
        moves = tuple(move for move in self._plan.moves if move.tensor in names)
        return filled, given_up, staged(Bucket((), moves, self._packs, {}, {}), rank)


@pytest.mark.parametrize("bucket_elements", [1, 150, 400, 3000, 10**5])
@pytest.mark.parametrize("case", FEW[::3], ids=str)
def test_buckets_are_bounded_and_hold_every_tensor_once(case: Case, bucket_elements: int) -> None:
    tensors = numbered(case.shape)
    for plan in case.plans(bucket_elements):
        needed = np.concatenate([elements(case.generating(rank)) for rank in plan.ranks])
        assert sorted(name for bucket in plan.buckets for name in bucket.tensors) == sorted(
            name for name, values in tensors.items() if np.isin(values, needed).any()
        )
        sizes = GroupSizes(plan)
        counts = []
        for bucket in plan.buckets:
            parts = [group for group in sizes.groups if set(group) & set(bucket.tensors)]
            assert all(set(group) <= set(bucket.tensors) for group in parts)
            assert {move.tensor for move in bucket.moves} <= set(bucket.tensors)
            counts.append(len(parts))
        for rank in plan.ranks:  # two buckets fit; a larger group is a bucket of its own
            previous = 0
            for bucket, count in zip(plan.buckets, counts, strict=True):
                filled, _, messages = sizes.of(bucket.tensors, rank)
                assert filled + messages <= bucket_elements // 2 or count == 1
                assert previous + filled + messages <= bucket_elements or not bucket.overlaps
                previous = filled + messages


@pytest.mark.parametrize("bucket_elements", [400, 3000, 10**5])
@pytest.mark.parametrize("case", FEW[::3], ids=str)
def test_no_bucket_is_closed_too_early(case: Case, bucket_elements: int) -> None:
    """One more group would take more than half of what may be in flight, raise the peak at the end, or have another type.

    In addition to its destination a rank may hold 1/32 of the bucket size, and the room for later parameters.
    """
    for plan in case.plans(bucket_elements):
        sizes = GroupSizes(plan)
        for index, (one, following) in enumerate(pairwise(plan.buckets)):
            added = next(group for group in sizes.groups if following.tensors[0] in group)
            if is_float32(added[0]) != is_float32(one.tensors[0]):
                continue
            later = {name for bucket in plan.buckets[index + 1 :] for name in bucket.tensors} - {*added}
            reasons = []
            for rank in plan.ranks:
                filled, given_up, messages = sizes.of([*one.tensors, *added], rank)
                to_come, to_go, _ = sizes.of(later, rank)
                room = min(bucket_elements, bucket_elements // 32 + to_come - to_go)
                reasons.append(filled + messages > bucket_elements // 2 or given_up + messages > room // 2)
            assert any(reasons)


@pytest.mark.parametrize("bucket_elements", [400, 3000, 10**5])
@pytest.mark.parametrize("case", FEW[1::3], ids=str)
def test_the_peak_is_the_generation_shard_and_a_small_bucket(case: Case, bucket_elements: int) -> None:
    """At most 1/32 of the bucket size, or one larger group, is added to the larger shard."""
    for plan in case.plans(bucket_elements):
        sizes = GroupSizes(plan)
        for rank, cost in plan_costs(plan, 1).items():
            alone = max(sum(sizes.of(group, rank)[1:]) for group in sizes.groups)
            assert cost.peak_bytes <= cost.destination_bytes + max(bucket_elements // 32, alone)
