"""Groups of one pattern share what is computed of the first: plans are those of groups that share nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from hybridengine.models.presets import PRESETS
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard import compiler
from hybridengine.reshard.alike import FusedGroup, fused_groups
from hybridengine.reshard.domains import domains
from hybridengine.reshard.layout import Shard
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.plan import Plan
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.test_audit import plans

CASES = [
    ("qwen3-30b-a3b", "1-4-2 e=8 etp=1", "1-4 e=4", 8),
    ("qwen3-30b-a3b", "2-2-4 e=4 etp=1", "1-4 e=4", 4),
    ("qwen3-30b-a3b", "2-4-2", "1-4", 4),
    ("deepseek-v3", "2-2-4 e=4 etp=1", "1-4 e=4", 2),
    ("llama3-8b", "3-4-2", "1-8", 2),
]


def small(name: str) -> ModelShape:
    shape = PRESETS[name].shape()
    if shape.experts:
        shape = replace(shape, experts=replace(shape.experts, num_experts=16))
    return replace(shape, num_layers=5)


def compiled(name: str, train: str, gen: str, ranks_per_node: int) -> list[Plan]:
    shape, grid = small(name), Grid(TrainSizes.parse(train), RankOrder.PAPER)
    generation = GenerationGrid(grid, GenSizes.parse(gen))
    layouts = megatron_layout(shape, grid), vllm_layout(shape, generation)
    nodes = NodeMap.uniform(grid.num_ranks, ranks_per_node)
    return [
        compiler.compile_plan(*layouts, ranks, 2**26, nodes, two_step)
        for ranks in domains(*layouts)
        for two_step in (True, False)
    ]


def unlike(shards: Iterable[Shard]) -> list[FusedGroup]:
    """Return the groups of tensors, each of a pattern of its own."""
    return [
        replace(group, pattern=tuple((*content, group.tensors) for content in group.pattern))
        for group in fused_groups(shards)
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_of_deep_models(case: tuple[str, str, str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    shared = compiled(*case)
    compiler.compile_plan.cache_clear()
    monkeypatch.setattr(compiler, "fused_groups", unlike)
    assert shared == compiled(*case)


@pytest.mark.parametrize(("p", "t"), [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_plans_of_every_kind(p: int, t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = [plan.digest for plan in plans(p, t)]
    compiler.compile_plan.cache_clear()
    monkeypatch.setattr(compiler, "fused_groups", unlike)
    assert shared == [plan.digest for plan in plans(p, t)]


def test_patterns() -> None:
    """A mixture has few patterns: layers and experts are alike where the same shards hold them."""
    shape, train = small("qwen3-30b-a3b"), TrainSizes.parse("1-1-4 e=4 etp=1")
    shards = megatron_layout(shape, Grid(train)).shards.values()
    groups = fused_groups(shards)
    assert sorted(name for group in groups for name in group.tensors) == sorted(shape.tensors)
    assert len({group.pattern for group in groups}) < 20 < len(groups)
