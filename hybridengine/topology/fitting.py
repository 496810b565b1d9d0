"""Reasons why a model cannot be divided at given sizes, by Megatron-core for training or by vLLM for generation."""

from __future__ import annotations

from hybridengine.models.shapes import ModelShape
from hybridengine.topology.sizes import GenSizes, TrainSizes


def train_problems(shape: ModelShape, sizes: TrainSizes) -> list[str]:
    """Return the reasons why Megatron-core cannot train `shape` at these sizes."""
    return [
        *shape.tp_problems(sizes.tp_size),
        *shape.pp_problems(*sizes.blocks),
        *shape.expert_problems(sizes.expert_parts, sizes.expert_shards),
        *shape.cp_problems(sizes.cp_size),
    ]


def gen_problems(shape: ModelShape, sizes: GenSizes, train_tp_size: int) -> list[str]:
    """Return the reasons why vLLM cannot hold `shape` at these sizes when it trains at t = `train_tp_size`.

    Engines on ranks of their own share no weights with training shards: `train_tp_size` is then their own.
    """
    return [
        *shape.pp_problems(sizes.pp_size, "p_g"),
        *shape.gen_tp_problems(sizes.tp_size, train_tp_size),
        *shape.expert_problems(sizes.expert_parts, sizes.expert_shards, ("e_g", "t_g")),
    ]
