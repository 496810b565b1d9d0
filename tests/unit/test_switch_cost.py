"""Costs of switches on whole clusters, compared with plans of every domain and with the paper's formulas at its sizes."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import pytest

from hybridengine.errors import PlanError
from hybridengine.models.presets import PRESETS
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.costs.clusters import load_cluster
from hybridengine.planning.costs.memory import generation_holding
from hybridengine.planning.switch.switch_cost import SwitchCost, SwitchPricer
from hybridengine.reshard.compiler import compile_plan, inverse_local
from hybridengine.reshard.cost import REMOTE, plan_costs
from hybridengine.reshard.domains import domains
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.plan import Plan
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.links import LinkClass, NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.numpy_shards import small_shape

ROOT = Path(__file__).parents[2]
H100 = ROOT / "configs" / "clusters" / "h100-80gb.yaml"
BYTES = {"bfloat16": 2, "float32": 4}
PAIRS = [
    ("2-2-2", "1-1"),
    ("2-4-1", "1-2"),
    ("1-4-2", "1-2"),
    ("1-2-4", "1-4"),
    ("2-2-2", "2-4"),
    ("3-1-4", "2-1"),
]


def grid(
    train: str, gen: str, order: RankOrder = RankOrder.PAPER, grouping=Grouping.INTERVAL
) -> GenerationGrid:
    return GenerationGrid(Grid(TrainSizes.parse(train), order), GenSizes.parse(gen), grouping)


def priced(shape: ModelShape, generation: GenerationGrid, per_node: int, two_step: bool = True) -> SwitchCost:
    nodes = NodeMap.uniform(generation.train.num_ranks, per_node)
    return SwitchPricer(shape, "float32", 2**13).price(generation, nodes, two_step)


@pytest.mark.parametrize(
    ("train", "gen", "order", "grouping", "per_node"),
    [
        (*pair, order, grouping, 2 + number % 3)
        for number, (pair, order, grouping) in enumerate(product(PAIRS, RankOrder, Grouping))
    ],
)
def test_repeated_domains_cost_what_planning_each_of_them_costs(
    train: str, gen: str, order: RankOrder, grouping: Grouping, per_node: int
) -> None:
    shape = small_shape("llama", tied=gen == "1-1", vocab=256 - 5, layers=5, kv_heads=4)
    generation = grid(train, gen, order, grouping)
    nodes = NodeMap.uniform(generation.train.num_ranks, per_node)
    source, destination = megatron_layout(shape, generation.train), vllm_layout(shape, generation)
    every, back = {}, {}
    for ranks in domains(source, destination):
        plan = compile_plan(source, destination, ranks, 2**13 // 4, nodes=nodes)
        every |= plan_costs(plan, 4, nodes)
        back |= plan_costs(inverse_local(plan), 4, nodes)
    cost = priced(shape, generation, per_node)
    assert sorted(every) == sorted(rank for _, repeats in cost.domains for ranks in repeats for rank in ranks)
    for domain, repeats in cost.domains:
        for ranks in repeats:
            for position, rank in enumerate(ranks):
                assert domain.there.costs[position] == every[rank], (rank, domain.there.plan.ranks)
                assert domain.back.costs[position] == back[rank]
    for link in REMOTE:
        assert cost.received_bytes_total_by_link[link] == sum(
            one.received_by_link[link] for one in every.values()
        )
        assert cost.received_bytes_max_by_link[link] == max(
            one.received_by_link[link] for one in every.values()
        )
    assert cost.received_bytes_max == max(one.received_bytes for one in every.values())
    assert cost.peak_weight_bytes_max == max(one.peak_bytes for one in (*every.values(), *back.values()))
    assert cost.redundant_bytes_max == max(one.redundant_bytes for one in every.values())
    held = generation_holding(shape, generation.train.sizes.pp_size, generation.sizes)
    assert cost.gen_shard_bytes_max == 4 * held.num_elements


def test_padding_of_the_vocabulary_makes_a_domain_of_its_own() -> None:
    """The last vocabulary shard is shorter: its domain must not be taken for one of the others."""
    even, padded = (
        small_shape("llama", tied=False, vocab=vocab, layers=2, kv_heads=4) for vocab in (256, 250)
    )
    generation = grid("2-4-1", "1-4")
    assert len(priced(even, generation, 8).domains) == 1
    assert len(priced(padded, generation, 8).domains) == 2


def test_crossing_domains_of_both_rank_orders() -> None:
    """2-4-2 -> 1-2 on two nodes of 8: 0 of 4 in the paper's order, 4 of 4 in Megatron's."""
    shape = small_shape("llama", tied=False, vocab=256, layers=4, kv_heads=4)
    crossing = {order: priced(shape, grid("2-4-2", "1-2", order), 8) for order in RankOrder}
    assert {order: (cost.num_crossing_domains, len(cost.groups)) for order, cost in crossing.items()} == {
        RankOrder.PAPER: (0, 4),
        RankOrder.MEGATRON: (4, 4),
    }
    between = {
        order: cost.received_bytes_total_by_link[LinkClass.BETWEEN_NODES] for order, cost in crossing.items()
    }
    assert between[RankOrder.PAPER] == 0 < between[RankOrder.MEGATRON]


def test_what_is_planned_is_audited() -> None:
    """Every move is counted once for each domain that differs; a missing one ends the planning."""
    shape, generation = (
        small_shape("llama", tied=False, vocab=250, layers=4, kv_heads=4),
        grid("1-4-2", "1-2"),
    )
    cost = priced(shape, generation, 8)
    assert len(cost.domains) == 2
    moves = [
        len(list(way.moves))
        for _, repeats in cost.domains
        for way in both_ways(shape, generation, repeats[0], NodeMap.uniform(8, 8))
    ]
    assert cost.check() == sum(moves)
    (domain, _), _ = cost.domains
    first, *others = domain.there.plan.buckets
    short = dataclasses.replace(first, moves=first.moves[1:])
    damaged = dataclasses.replace(domain.there.plan, buckets=(short, *others))
    wrong = dataclasses.replace(domain, there=dataclasses.replace(domain.there, plan=damaged))
    with pytest.raises(PlanError, match=r"is wrong \(\d+ problems, first: .*report it"):
        dataclasses.replace(cost, domains=((wrong, ()),)).check()


def both_ways(
    shape: ModelShape, generation: GenerationGrid, ranks: tuple[int, ...], nodes: NodeMap
) -> tuple[Plan, Plan]:
    layouts = megatron_layout(shape, generation.train), vllm_layout(shape, generation)
    plan = compile_plan(*layouts, ranks, 2**11, nodes=nodes)
    return plan, inverse_local(plan)


def test_two_steps_send_a_box_into_a_node_once() -> None:
    """2-4-1 -> 1-2 on nodes of 4, one stage each: t/t_g = 2 ranks of a node need what it lacks."""
    shape = small_shape("llama", tied=False, vocab=256, layers=4, kv_heads=4)
    two, one = (priced(shape, grid("2-4-1", "1-2"), 4, two_step) for two_step in (True, False))
    assert (two.num_steps, one.num_steps) == (2, 1)
    assert two.received_bytes_max == one.received_bytes_max
    totals = [cost.received_bytes_total_by_link[LinkClass.BETWEEN_NODES] for cost in (two, one)]
    assert 2 * totals[0] == totals[1]


def planned(name: str, train: str, gen: str) -> SwitchCost:
    generation = grid(train, gen)
    nodes = load_cluster(H100).node_map(generation.train.num_ranks)
    return SwitchPricer(PRESETS[name].shape(), "bfloat16", 2**30).price(generation, nodes)


def test_stages_send_in_turn_where_boxes_are_passed_on() -> None:
    """34B, 2-8-8 -> 1-4: both stages fill the network between their nodes in most buckets, not one after the other."""
    cluster = load_cluster(ROOT / "configs" / "clusters" / "a100-80gb-16x8.yaml")
    pricer = SwitchPricer(PRESETS["codellama-34b"].shape(), "bfloat16", 2**30)
    cost = pricer.price(grid("2-8-8", "1-4"), cluster.node_map(128))
    assert cost.num_steps == 2
    assert 1 <= cost.seconds_there(cluster) / cost.line_rate_seconds(cluster) < 1.1


def test_70b_on_1024_ranks_by_the_papers_formula() -> None:
    """8-8-16 -> 1-8: (d_g - 1)/(t·p)·M received, peak M/(t_g·p_g); a domain is one rank on each of 8 nodes."""
    cost = planned("llama3-70b", "8-8-16", "1-8")
    total = PRESETS["llama3-70b"].shape().weight_bytes("bfloat16")
    # The ranks of the stages with the embedding or the head hold more than their share, and the others receive more.
    assert cost.received_bytes_max == pytest.approx(7 / 64 * total, rel=0.01)
    assert cost.gen_shard_bytes_max == pytest.approx(total / 8, rel=1e-3)
    assert cost.peak_weight_bytes_max <= cost.gen_shard_bytes_max + cost.bucket_bytes_max
    assert cost.redundant_bytes_max == cost.extra_bytes_max == 0
    # All ranks together: what each needs, minus what each holds (norms are whole on all ranks of both).
    received = sum(cost.received_bytes_total_by_link.values())
    assert received == pytest.approx((1024 / 8 - 16) * total, rel=1e-3)
    assert cost.received_bytes_max_by_link[LinkClass.BETWEEN_NODES] == cost.received_bytes_max
    assert (len(cost.groups), cost.num_crossing_domains) == (128, 128)


@pytest.mark.parametrize(
    ("name", "train", "gen", "num_domains"),
    [
        ("llama3-70b", "8-8-16", "1-8", 128),
        ("llama3-8b", "1-8-256", "1-2", 512),
    ],
)
def test_few_domains_are_planned_for_thousands_of_ranks(
    name: str, train: str, gen: str, num_domains: int
) -> None:
    cost = planned(name, train, gen)
    assert len(cost.groups) == num_domains
    assert len(cost.domains) <= 2


@pytest.mark.parametrize(("train", "gen"), [("2-2-4", "1-2"), ("1-4-2", "1-2"), ("2-2-2", "1-1")])
def test_orders_with_the_same_domains_share_plans(train: str, gen: str) -> None:
    """Orders of ranks and numbers of steps, priced one after another, cost what each costs alone."""
    shape, nodes = small_shape("llama", tied=False, vocab=256, layers=4, kv_heads=4), NodeMap.uniform(16, 4)
    pricer = SwitchPricer(shape, "float32", 2**13)
    for order, two_step in product(RankOrder, (True, False)):
        generation = grid(train, gen, order)
        shared = pricer.price(generation, nodes, two_step)
        alone = SwitchPricer(shape, "float32", 2**13).price(generation, nodes, two_step)
        assert dataclasses.replace(shared, domains=()) == dataclasses.replace(alone, domains=())
        assert shared.groups == alone.groups
