"""Elements and parameter tensors of the fullest rank of a layout, counted from the layout and cached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from hybridengine.families.family import NameSet
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.layout import Shard
from hybridengine.reshard.megatron import megatron_shard
from hybridengine.reshard.vllm import vllm_shard


@dataclass(frozen=True)
class Holding:
    """Parameters of the fullest rank."""

    num_elements: int
    num_parameters: int
    """Number of parameter tensors."""


@lru_cache(maxsize=4096)
def training_holding(shape: ModelShape, pp_size: int, tp_size: int) -> Holding:
    """Return the parameters that a rank trains at (p, t); t divides evenly, so that the ranks of a stage are equal."""
    return _most(
        megatron_shard(shape, stage, pp_size, 0, tp_size, NameSet.LOCAL) for stage in _busy_stages(pp_size)
    )


@lru_cache(maxsize=4096)
def generation_holding(shape: ModelShape, train_pp_size: int, pp_size: int, tp_size: int) -> Holding:
    """Return the parameters of an engine's rank at (p_g, t_g), given `train_pp_size` training stages."""
    stages = shape.gen_stage_layers(train_pp_size, pp_size)
    return _most(vllm_shard(shape, stages, stage, 0, tp_size) for stage in _busy_stages(pp_size))


def _busy_stages(pp_size: int) -> list[int]:
    """Return the stages that may be the fullest: the first (embedding), the second (most layers of the inner stages), and
    the last (head)."""
    return sorted({0, min(1, pp_size - 1), pp_size - 1})


def _most(shards: Iterable[Shard]) -> Holding:
    counts = [(shard.num_elements, len(shard.parameters)) for shard in shards]
    return Holding(*map(max, zip(*counts, strict=True)))
