"""Senders and receivers of a plan: two steps over nodes, least loaded owners, a separate pool for generation."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from hybridengine.reshard.audit import audit
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.cost import plan_costs
from hybridengine.reshard.layout import Layout, hf_layout
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.plan import Plan
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.links import LinkClass, NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.numpy_shards import assert_same, cut_shard, numbered, small_shape
from tests.unit.plan_cases import (
    CASES,
    FEW,
    GENERAL,
    Case,
    elements,
    execute,
    fitting_shape,
    peak_bound,
    sent_bytes,
)

BETWEEN = LinkClass.BETWEEN_NODES


def entries(plan: Plan, nodes: NodeMap) -> Counter[int]:
    """Return rank -> number of elements that it receives from other nodes."""
    found = Counter(dict.fromkeys(plan.ranks, 0))
    for move in plan.moves:
        if nodes.node_of(move.source.rank) != nodes.node_of(move.destination.rank):
            found[move.destination.rank] += move.num_elements
    return found


# training, generation, rank order, ranks per node: each node holds one pipeline stage of a replica.
STAGES_ON_NODES = [
    ("2-4-1", "1-2", RankOrder.PAPER, 4),
    ("2-4-1", "1-1", RankOrder.PAPER, 4),
    ("2-4-2", "1-2", RankOrder.PAPER, 4),
    ("4-2-1", "1-1", RankOrder.PAPER, 2),
    ("4-2-1", "2-1", RankOrder.PAPER, 2),
    ("2-2-2", "1-1", RankOrder.MEGATRON, 4),
    ("2-4-2", "1-2", RankOrder.MEGATRON, 8),
]


@pytest.mark.parametrize(("train", "gen", "order", "ranks_per_node"), STAGES_ON_NODES)
def test_two_steps_cross_nodes_t_over_t_g_times_less(
    train: str, gen: str, order: RankOrder, ranks_per_node: int
) -> None:
    """Expected: (p/p_g - 1)/(pt)·M per rank between stages, t/t_g times less than from the owners; the same total."""
    sizes, gen_sizes = TrainSizes.parse(train), GenSizes.parse(gen)
    p, t, p_g, t_g = sizes.pp_size, sizes.tp_size, gen_sizes.pp_size, gen_sizes.tp_size
    shape = small_shape(
        layers=p, vocab=64 * t, kv_heads=t
    )  # every stage has one layer, the first and the last one a matrix each
    case = Case(shape, train, gen, order)
    nodes = NodeMap.uniform(sizes.num_ranks, ranks_per_node)
    layer = sum(math.prod(size) for name, size in shape.layer_tensors(0).items() if "norm" not in name)
    matrix, norms = shape.vocab_size * shape.hidden_size, 2 * shape.hidden_size
    stages = p // p_g
    for two, one in zip(case.plans(nodes=nodes), case.plans(nodes=nodes, two_step=False), strict=True):
        assert (two.num_steps, one.num_steps) == (2, 1)
        entered = entries(two, nodes)
        for rank in two.ranks:
            place = case.grid.coordinate(rank)
            own, first = place.pp_rank, place.pp_rank // stages * stages
            others = [stage for stage in range(first, first + stages) if stage != own]
            cut = len(others) * layer + matrix * ((0 in others) + (p - 1 in others))
            whole = len(others) * norms + shape.hidden_size * (p - 1 in others)
            expected = (
                cut / t + whole * t_g / t
            )  # per rank: a stage's part of the engine's shard, divided over t/t_g ranks
            assert entries(one, nodes)[rank] == cut / t_g + whole
            largest = max(move.num_elements for move in two.moves)
            assert abs(entered[rank] - expected) <= largest
        assert sum(entries(one, nodes).values()) == t // t_g * sum(entered.values())
        in_two, in_one = plan_costs(two, 1, nodes), plan_costs(one, 1, nodes)
        for rank in two.ranks:
            assert in_two[rank].received_bytes == in_one[rank].received_bytes
            assert in_two[rank].received_by_link[BETWEEN] == entered[rank]
            assert in_one[rank].received_by_link[BETWEEN] == entries(one, nodes)[rank]


def distinct(boxes: list[tuple[str, tuple]]) -> list[tuple[str, tuple]]:
    return list(dict.fromkeys(boxes))


@pytest.mark.parametrize("case", CASES[::4] + FEW + GENERAL, ids=str)
def test_a_box_enters_a_node_once_and_only_where_the_node_lacks_it(case: Case) -> None:
    """Compared element by element with what the ranks of the node train with."""
    tensors = numbered(case.shape)
    num_ranks = case.grid.num_ranks
    for ranks_per_node in {2, 3, max(1, num_ranks // 2)}:
        nodes = NodeMap.uniform(num_ranks, ranks_per_node)
        for plan in case.plans(nodes=nodes):
            held, entered = defaultdict[int, list[np.ndarray]](list), defaultdict[int, list[np.ndarray]](list)
            for rank in plan.ranks:
                held[nodes.node_of(rank)].append(elements(case.training(rank)))
            for move in plan.moves:
                source, target = (nodes.node_of(place.rank) for place in (move.source, move.destination))
                assert move.step == 0 or source == target, f"{move} leaves its node"
                if source != target:
                    box = tensors[move.tensor][tuple(slice(a, b) for a, b in move.box)]
                    entered[target].append(box.ravel())
            for node, boxes in entered.items():
                numbers = np.concatenate(boxes)
                assert not np.isin(numbers, np.concatenate(held[node])).any(), "a node is sent what it has"
                assert len(np.unique(numbers)) == len(numbers), "an element enters a node twice"


def test_ranks_of_a_node_share_what_enters() -> None:
    """Four ranks of a node need all of the other node's stage: each receives a quarter, apart from the largest box."""
    case = Case(small_shape(layers=4, vocab=256, kv_heads=4), "2-4-1", "1-1")
    nodes = NodeMap.uniform(8, 4)
    (plan,) = case.plans(nodes=nodes)
    largest = max(move.num_elements for move in plan.moves)
    entered = entries(plan, nodes)
    for ranks in (range(4), range(4, 8)):
        counts = [entered[rank] for rank in ranks]
        assert max(counts) - min(counts) <= largest < min(counts)
    passed_on = Counter(move.source.rank for move in plan.moves if move.step == 1)
    assert set(passed_on) == set(range(8))


def test_nodes_of_one_rank_and_one_node_for_all_need_one_step() -> None:
    case = Case(fitting_shape("llama", False, 2, 2), "2-2-1", "1-1")
    (plain,) = case.plans()
    for ranks_per_node in (1, 4):
        (plan,) = case.plans(nodes=NodeMap.uniform(4, ranks_per_node))
        assert plan.num_steps == 1
    assert case.plans(nodes=NodeMap.uniform(4, 4)) == [plain]


def test_owners_on_the_same_node_come_first() -> None:
    """Norms are held by both ranks of a stage; a node with one of these ranks requests none from the other node."""
    case = Case(fitting_shape("llama", False, 2, 2), "2-2-1", "1-2", RankOrder.PAPER)
    for plan in case.plans(nodes=NodeMap((1, 2, 1))):  # ranks 1 and 2 share a node: one of each stage
        for move in plan.moves:
            if "norm" in move.tensor:
                owners = {rank for rank in plan.ranks if move.tensor in plan.source.shard(rank).pieces}
                near = owners & ({1, 2} if move.destination.rank in (1, 2) else {move.destination.rank})
                assert move.source.rank in (near or owners)


def test_replicas_share_the_sending() -> None:
    """Four replicas of a model and one rank without: each replica sends a quarter, apart from the largest tensor."""
    shape = fitting_shape("llama", False, 1, 2)
    plan = compile_plan(megatron_layout(shape, Grid(TrainSizes(1, 1, 4))), hf_layout(shape, (4,)), range(5))
    sent = [sent_bytes(cost) for cost in plan_costs(plan, 1).values()]
    assert sum(sent) == shape.num_parameters and sent[4] == 0
    assert max(sent[:4]) - min(sent[:4]) <= max(math.prod(size) for size in shape.tensors.values())


def pool(shape, train: str, gen: str, first_rank: int) -> Layout:
    """Return a layout of engines on ranks of their own, starting at `first_rank`."""
    layout = vllm_layout(shape, GenerationGrid(Grid(TrainSizes.parse(train)), GenSizes.parse(gen)))
    return dataclasses.replace(layout, keys={rank + first_rank: key for rank, key in layout.keys.items()})


@pytest.mark.parametrize("ranks_per_node", [2, 4, 6])
@pytest.mark.parametrize(("replicas", "gen"), [("1-2-1", "1-2"), ("1-1-2", "1-1"), ("2-1-1", "2-1")])
@pytest.mark.parametrize("tied", [False, True])
def test_a_separate_pool_is_fed_by_the_least_loaded_owners(
    replicas: str, gen: str, tied: bool, ranks_per_node: int
) -> None:
    """1-2-2 on ranks 0 to 3 feeds engines on ranks 4 and 5: both replicas send, and no rank gives anything up."""
    shape = small_shape("qwen3", tied=tied, layers=3, vocab=128, kv_heads=4)
    source, destination = megatron_layout(shape, Grid(TrainSizes(1, 2, 2))), pool(shape, replicas, gen, 4)
    nodes, tensors = NodeMap.uniform(6, ranks_per_node), numbered(shape)
    plan = compile_plan(source, destination, range(6), 400, nodes)
    assert audit(plan) == []
    held = {rank: cut_shard(source.shard(rank), tensors) if rank < 4 else {} for rank in range(6)}
    made = execute(plan, held)
    for rank in range(6):
        expected = cut_shard(destination.shard(rank), tensors) if rank > 3 else {}
        assert_same(made[rank], expected, f"rank {rank}")
        assert (
            len(held[rank])
            == len(plan.retained(rank))
            == (len(source.shard(rank).parameters) if rank < 4 else 0)
        )
    costs = plan_costs(plan, 1, nodes)
    largest = max(move.num_elements for move in plan.moves)
    for rank in range(6):
        received = sum(values[values > 0].size for values in made[rank].values())
        assert (costs[rank].received_bytes, costs[rank].extra_bytes, costs[rank].redundant_bytes) == (
            received,
            0,
            0,
        )
        assert costs[rank].peak_bytes <= peak_bound(costs[rank])
    if (
        ranks_per_node != 2
    ):  # with two, ranks 0 and 1 and ranks 2 and 3 are nodes; they also send equal amounts
        assert max(sent_bytes(costs[0]), sent_bytes(costs[2])) > 0
    for shard in ((0, 2), (1, 3)):  # the two owners of a tensor shard
        one, other = (sent_bytes(costs[rank]) for rank in shard)
        assert one > 0 and other > 0 and abs(one - other) <= 2 * largest
    if ranks_per_node == 4:  # every engine rank is on the second node: boxes that both need enter once
        needed = {n for rank in (4, 5) for values in made[rank].values() for n in values.ravel().tolist()} - {
            0
        }
        assert sum(cost.received_by_link[BETWEEN] for cost in costs.values()) == len(needed)
        assert (
            abs(costs[4].received_by_link[BETWEEN] - costs[5].received_by_link[BETWEEN]) <= largest
            or gen != "1-1"
        )
