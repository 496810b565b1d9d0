"""Costs of mixtures of experts, compared with sums over tensors, ranks and draws, written out."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from hybridengine.config.role_sections import MegatronSettings
from hybridengine.families.family import is_of_expert
from hybridengine.families.sizes import ExpertSizes
from hybridengine.models.presets import PRESETS
from hybridengine.models.shapes import ModelShape
from hybridengine.planning.costs.activations import activation_bytes, layer_bytes
from hybridengine.planning.costs.clusters import Cluster, Fabric
from hybridengine.planning.costs.decoding import Engine
from hybridengine.planning.costs.lengths import MicroBatches
from hybridengine.planning.costs.memory import layer_weights, model_memory, training_holding
from hybridengine.planning.costs.mixtures import (
    dispatch_s,
    mixture_bytes,
    replica_axes,
    stage_axes,
    touched_share,
)
from hybridengine.planning.costs.passes import ModelPasses
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.topology.experts import ExpertGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.test_planning_costs import plain_cluster

SHAPE = ModelShape("qwen3_moe", 6, 256, 512, 8, 4, 32, 1024, 4096, experts=ExpertSizes(16, 4, 96))
SIZES = [
    TrainSizes.parse(text)
    for text in (
        "1-1-8 e=8",
        "1-2-4 e=4 etp=1",
        "1-2-4 e=2",
        "1-2-4 etp=1",
        "2-2-4 e=4 etp=1",
        "2-2-4 e=8 etp=1",
        "2-2-2 c=2 e=4 etp=1",
        "2-4-4 e=2 etp=2",
        "2-4-4 e=16 etp=1",
        "3-4-8 e=8 etp=2",
        "3-1-8 e=2 etp=4",
    )
]
SLOW_ARITHMETIC, NO_ARITHMETIC = {"bfloat16": 1e6}, {"bfloat16": 1e18}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("mixtral-8x22b", 141e9, 39e9),
    ],
)
def test_parameters_of_a_token_are_the_published_ones(name: str, total: float, active: float) -> None:
    shape = PRESETS[name].shape()
    assert shape.num_parameters == pytest.approx(total, rel=0.005)
    assert shape.num_active_parameters == pytest.approx(active, rel=0.02)
    dense = PRESETS["qwen3-8b"].shape()
    assert dense.num_active_parameters == dense.num_parameters


def matrices(shape: ModelShape) -> tuple[int, int]:
    """Return the weights of a layer's matrices that every token needs, and those of the experts of one."""
    every = routed = 0
    for name, size in shape.layer_tensors(0).items():
        if len(size) > 1:
            number = math.prod(size)
            every, routed = (every, routed + number) if is_of_expert(name) else (every + number, routed)
    assert shape.experts is not None
    return every, routed * shape.experts.num_active // shape.experts.num_experts


def test_a_pass_computes_with_the_chosen_experts_alone() -> None:
    every, active = matrices(SHAPE)
    assert (layer_weights(SHAPE).every, layer_weights(SHAPE).active) == (every, active)
    micro, cluster = MicroBatches(3, 200.0, 80.0, 50.0), plain_cluster(flops_per_s=SLOW_ARITHMETIC)
    operations = 6 * 2 * 200 * (every + active) + 2 * 80 * 256 * 1024 + 4 * 200 * 50 * 256 * 6
    for sizes in SIZES:
        if sizes.pp_size == 1:
            found = ModelPasses(SHAPE, sizes, "bfloat16", cluster).forward(micro).path_s
            assert found == pytest.approx(3 * operations / sizes.tp_size / 1e6, rel=1e-3), sizes
    # Matrices of an expert have as many rows as choose it: 200·4/16 of one replica, and of each more that shares it.
    slow = plain_cluster(flops_per_s=SLOW_ARITHMETIC, half_tokens=100.0)
    for e in (1, 8):
        sizes = TrainSizes(1, 1, 8, expert_parts=e)
        found = ModelPasses(SHAPE, sizes, "bfloat16", slow).forward(micro).path_s
        starts = 6 * 2 * 200 * (every * 100 / 200 + active * 100 / (50 * e)) + 2 * 80 * 256 * 1024 * 0.5
        assert found == pytest.approx(3 * (operations + starts) / 1e6, rel=1e-3)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("node", [4, 8])
def test_groups_lie_on_nodes_as_those_of_the_grid(sizes: TrainSizes, node: int) -> None:
    """The members on the node of each group's first rank, counted in the grid's own groups."""
    fabric = Fabric(
        plain_cluster().model_copy(update={"nodes": 64, "devices_per_node": node}), sizes.num_ranks
    )
    grid = ExpertGrid(Grid(sizes))
    for axis, axes in (
        ("ep", stage_axes(sizes, sizes.expert_parts, sizes.expert_shards)),
        ("etp", stage_axes(sizes, sizes.expert_shards, 1)),
        ("edp", replica_axes(sizes)),
    ):
        groups = grid.groups(axis)
        assert math.prod(one.size for one in axes) == len(groups[0])
        together = max(Counter(rank // node for rank in group).most_common(1)[0][1] for group in groups)
        if (
            sizes.num_ranks // sizes.replica_size > 1
            and node % (sizes.replica_size)
            and sizes.replica_size % node
        ):
            continue  # replicas that straddle nodes
        assert math.prod(map(fabric.members_per_node, axes)) == together, axis


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_reach_their_experts_in_the_time_of_the_busiest_link(sizes: TrainSizes) -> None:
    """Bytes between every two ranks, summed by link; all-gathers and reduce-scatters of shards are rings."""
    link = {"bytes_per_s": 1e9, "latency_s": 0.0}
    slow = {"bytes_per_s": 1e8, "latency_s": 0.0}
    cluster = Cluster.model_validate(
        plain_cluster().model_dump()
        | {"links": {"same_device": link, "same_node": link, "between_nodes": slow}}
    )
    fabric, tokens = Fabric(cluster, sizes.num_ranks), 512.0
    rows = tokens / sizes.tp_size * 4
    found = dispatch_s(fabric, SHAPE, sizes, tokens, "bfloat16")
    grid = ExpertGrid(Grid(sizes))

    def all_to_all_s(num_bytes: float) -> float:
        times = []
        for group in grid.groups("ep"):
            for rank in group:
                near = sum(other // 4 == rank // 4 and other != rank for other in group)
                far = sum(other // 4 != rank // 4 for other in group)
                times.append(max(near * num_bytes / len(group) / 1e9, far * num_bytes / len(group) / 1e8))
        return max(times)

    expected = 2 * all_to_all_s(rows * 256 * 2) + all_to_all_s(rows * 2)
    if (etp := sizes.expert_shards) > 1:
        group = grid.groups("etp")[0]
        rate = 1e8 if len({rank // 4 for rank in group}) > 1 else 1e9
        received = rows * etp * (etp - 1) / etp * 2
        expected += (2 * 256 * received + received) / rate
    assert found == pytest.approx(expected, rel=1e-6)


def test_replicas_of_experts_exchange_their_gradients_among_themselves() -> None:
    cluster = plain_cluster(flops_per_s=NO_ARITHMETIC)
    micro = MicroBatches(1, 1e-6, 1e-6, 1e-6)
    for sizes in SIZES:
        held = training_holding(SHAPE, sizes)
        layout = megatron_layout(SHAPE, Grid(sizes))
        own = max(
            sum(one.num_elements for one in shard.parameters if is_of_expert(one.name))
            for shard in layout.shards.values()
        )
        assert held.num_of_experts == own
        others, d, edp = held.num_elements - own, sizes.dp_size * sizes.cp_size, sizes.expert_replicas
        expected = others * (30 / d + 8 + 6 * (d - 1) / d) + own * (30 / edp + 8 + 6 * (edp - 1) / edp)
        found = ModelPasses(SHAPE, sizes, "bfloat16", cluster).update(micro, 1).path_s
        assert found == pytest.approx(expected / 1e9, rel=1e-3), sizes
        memory = model_memory(SHAPE, sizes, "bfloat16")
        assert memory.optimizer_bytes == pytest.approx(12 * (others / d + own / edp), abs=2)


def test_a_step_of_decoding_reads_the_experts_that_are_chosen() -> None:
    draws = np.random.default_rng(0)
    for num_rows in (1, 3, 20):
        found = [
            len({int(one) for _ in range(num_rows) for one in draws.choice(16, 4, replace=False)}) / 16
            for _ in range(2000)
        ]
        assert touched_share(SHAPE, num_rows) == pytest.approx(np.mean(found), abs=0.01)
    every, active = matrices(SHAPE)
    experts = 6 * 16 * 3 * 256 * 96
    for parts in (1, 2):
        engine = Engine(
            SHAPE, GenSizes(1, 2, parts), 1, "bfloat16", plain_cluster(flops_per_s=NO_ARITHMETIC), 2
        )
        more, less = (engine.step_s(count, 0.0) for count in (1e3, 1))
        exchanged = 6 * 2 * 2 * 256 * 2 * (1e3 - 1) / 2 / 1e9
        assert more - less - exchanged == pytest.approx(2 * experts / 2 * 0.75 / 1e9, rel=1e-3)
    slow = plain_cluster(flops_per_s=SLOW_ARITHMETIC, decode_efficiency=1.0)
    engine = Engine(SHAPE, GenSizes(1, 2, 2), 1, "bfloat16", slow, 2)
    weights = 6 * (every + active) + 1024 * 256
    assert engine.step_s(8, 0.0) == pytest.approx(8 * 2 * weights / 2 / 1e6, rel=1e-3)
    assert engine.prefill_s(8.0) == pytest.approx(8 * 2 * 6 * (every + active) / 2 / 1e6, rel=1e-3)


def test_the_first_stage_keeps_its_layers_with_and_without_experts() -> None:
    """One of 6 layers has an MLP: the first of two stages keeps it and two with experts, for two micro-batches."""
    shape = ModelShape("qwen3_moe", 6, 256, 512, 8, 4, 32, 1024, 4096, experts=ExpertSizes(16, 4, 96, 1))
    sizes, micro = TrainSizes(2, 1, 2, expert_parts=2), MicroBatches(8, 100.0, 0.0, 50.0)
    dense = layer_bytes(shape, 1, "bfloat16")
    each = mixture_bytes(shape, sizes, "bfloat16", sequence_parallel=True)
    mixed = dense.kept - 3 * 512 * 2 - 512 + each.kept  # no MLP; the norm's output counts with the experts
    hidden = 256 * 2
    for recompute, kept, again in (
        ("none", dense.kept + 2 * mixed, 0.0),
        ("full", 3 * hidden, mixed),
    ):
        used = MegatronSettings.model_validate({"recompute": recompute})
        found = activation_bytes(shape.with_score_head(), sizes, "bfloat16", micro, used, trains=True)
        assert found == int((2 * (kept + hidden) + again + hidden + each.working) * 100)
