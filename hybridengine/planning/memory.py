"""Memory of one rank in each phase: weights, gradients, optimizer state, KV cache, and the switch from its plan.

Activations and framework overhead are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridengine.model_shapes import DTYPE_BYTES, ModelShape
from hybridengine.reshard.cost import RankCost, rank_cost
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.plan import Plan
from hybridengine.reshard.planner import compile_plan, inverse_local
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid

GRADIENT_BYTES = 4
MOMENT_BYTES = 8
"""Adam's two moments in float32."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of the rank with the most, for a model that is trained."""

    weights_bytes: int
    gradients_bytes: int
    """Float32, released while generating."""
    optimizer_bytes: int
    """Moments, and float32 master weights where the weights are not float32; sharded over d."""


@dataclass(frozen=True)
class SwitchCost:
    """What switching costs: the rank with the most of each."""

    plans: tuple[Plan, ...]
    """One plan per micro-DP group of the first replica; other replicas repeat them."""
    received_bytes: int
    peak_bytes: int
    """Of the way there and the way back."""
    train_bytes: int
    gen_bytes: int
    bucket_bytes: int


def training_memory(shape: ModelShape, grid: Grid, dtype: str) -> TrainingMemory:
    """Memory of training `shape` on `grid` under the distributed optimizer."""
    layout = megatron_layout(shape, grid)
    elements = max(shard.num_elements for shard in layout.shards.values())
    per_weight = MOMENT_BYTES + (4 if dtype != "float32" else 0)
    return TrainingMemory(
        weights_bytes=elements * DTYPE_BYTES[dtype],
        gradients_bytes=elements * GRADIENT_BYTES,
        optimizer_bytes=-(-elements * per_weight // grid.sizes.dp_size),
    )


def switch_cost(shape: ModelShape, generation: GenerationGrid, dtype: str, bucket_bytes: int) -> SwitchCost:
    """Cost of switching, from the plans of the first replica's micro-DP groups.

    Raises:
        PlanError: the layouts do not nest.
    """
    source, destination = megatron_layout(shape, generation.train), vllm_layout(shape, generation)
    first = [group for group in generation.micro_dp_groups if generation.coordinate(group[0]).dp_rank == 0]
    plans = tuple(
        compile_plan(source, destination, group, bucket_bytes // DTYPE_BYTES[dtype]) for group in first
    )
    element_bytes = DTYPE_BYTES[dtype]
    costs: Sequence[RankCost] = [
        rank_cost(plan, rank, element_bytes) for plan in plans for rank in plan.ranks
    ]
    ways_back = [inverse_local(plan) for plan in plans]
    peak_back = max(
        rank_cost(back, rank, element_bytes).peak_bytes for back in ways_back for rank in back.ranks
    )
    return SwitchCost(
        plans=plans,
        received_bytes=max(cost.received_bytes for cost in costs),
        peak_bytes=max(peak_back, *(cost.peak_bytes for cost in costs)),
        train_bytes=max(cost.source_bytes for cost in costs),
        gen_bytes=max(cost.destination_bytes for cost in costs),
        bucket_bytes=max(cost.bucket_bytes for cost in costs),
    )
