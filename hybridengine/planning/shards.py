"""What the busiest rank of a layout holds, counted from the layout itself and kept: elements and parameter tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hybridengine.families.tables import NameSet
from hybridengine.model_shapes import ModelShape
from hybridengine.reshard.megatron import megatron_shard
from hybridengine.reshard.vllm import vllm_shard


@dataclass(frozen=True)
class Holding:
    """Of the stage with the most."""

    num_elements: int
    num_parameters: int
    """Parameter tensors."""


@lru_cache(maxsize=4096)
def training_holding(shape: ModelShape, pp_size: int, tp_size: int) -> Holding:
    """What a rank trains at p-t; t divides evenly, so that the ranks of a stage hold the same."""
    shards = [
        megatron_shard(shape, stage, pp_size, 0, tp_size, NameSet.LOCAL) for stage in _busy_stages(pp_size)
    ]
    return Holding(
        max(shard.num_elements for shard in shards), max(len(shard.parameters) for shard in shards)
    )


@lru_cache(maxsize=4096)
def generation_holding(shape: ModelShape, train_pp_size: int, pp_size: int, tp_size: int) -> Holding:
    """What an engine's rank holds at p_g-t_g over training stages of which there are p."""
    stages = shape.gen_stage_layers(train_pp_size, pp_size)
    shards = [vllm_shard(shape, stages, stage, 0, tp_size) for stage in _busy_stages(pp_size)]
    return Holding(
        max(shard.num_elements for shard in shards), max(len(shard.parameters) for shard in shards)
    )


def _busy_stages(pp_size: int) -> list[int]:
    """Stages of which one has the most: the first has the embedding, the last the head, the second the most layers of
    those with neither."""
    return sorted({0, min(1, pp_size - 1), pp_size - 1})
