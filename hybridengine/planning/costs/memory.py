"""Memory of a model's state on one rank: weights, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from hybridengine.config import RunConfig, holder_shape, model_holders, model_shape
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.config.run_config import TRAINED
from hybridengine.families.adapters import is_of_adapter
from hybridengine.families.family import NameSet, is_of_expert
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.reshard.layout import Shard
from hybridengine.reshard.megatron import megatron_shard
from hybridengine.reshard.vllm import vllm_shard
from hybridengine.topology.sizes import GenSizes, TrainSizes

GRADIENT_BYTES = 4
MOMENT_BYTES = 8
"""Bytes of Adam's two moments in float32."""


FP8_WEIGHT_BYTES = {"none": 0.0, "tensorwise": 2.0, "blockwise": 2 + 8 / 128**2, "mxfp8": 2 + 2 / 32}
"""Bytes of the copies that Transformer Engine keeps of each weight of a layer's matrices, by `MegatronSettings.fp8`: one
by rows and one by columns, with their scales. GPUs of compute capability 10 need the first alone for tensorwise.

Source: Transformer Engine 2.20, `module/base.py`, `quantize_weight`, and its quantizers."""


@dataclass(frozen=True)
class Holding:
    num_elements: int
    num_parameters: int
    """Number of parameter tensors."""
    num_of_experts: int = 0
    """Elements that belong to experts, which have replicas of their own."""
    num_trained: int = 0
    """Elements that are trained: those of adapters, or all of a model without."""
    num_trained_of_experts: int = 0
    num_adapted: int = 0
    """Elements of frozen weights with adapters."""


def training_holding(shape: ModelShape, sizes: TrainSizes, stage: int | None = None) -> Holding:
    """Return the parameters that a rank of a stage trains, by default the fullest; t divides evenly, so that the ranks of
    a stage are equal.

    Virtual stages have no influence: whatever v is, a stage has layers / p layers, one more if it is among the first.
    """
    stages = _busy_stages(sizes.pp_size) if stage is None else (stage,)
    shards = sizes.expert_shards if shape.experts else 1
    return _stage_holding(shape, sizes.pp_size, sizes.tp_size, sizes.expert_parts, shards, stages)


@lru_cache(maxsize=4096)
def _stage_holding(
    shape: ModelShape, pp_size: int, tp_size: int, parts: int, shards: int, stages: tuple[int, ...]
) -> Holding:
    sizes = TrainSizes(pp_size, tp_size, parts * shards, expert_parts=parts, expert_shards=shards)
    return _most(megatron_shard(shape, sizes, (stage, 0, 0, 0), NameSet.LOCAL) for stage in stages)


@lru_cache(maxsize=4096)
def generation_holding(shape: ModelShape, train_pp_size: int, gen: GenSizes) -> Holding:
    """Return the parameters of an engine's rank at `gen`, given `train_pp_size` training stages."""
    stages = shape.gen_stage_layers(train_pp_size, gen.pp_size)
    return _most(vllm_shard(shape, stages, stage, 0, gen) for stage in _busy_stages(gen.pp_size))


def _busy_stages(pp_size: int) -> tuple[int, ...]:
    """Return the stages that may be the fullest: the first, the second (with the most inner layers) and the last."""
    return tuple(sorted({0, min(1, pp_size - 1), pp_size - 1}))


def _most(shards: Iterable[Shard]) -> Holding:
    return Holding(*map(max, zip(*map(_counts, shards), strict=True)))


def _counts(shard: Shard) -> tuple[int, ...]:
    adapters = [one for one in shard.parameters if is_of_adapter(one.name)]
    layers = {one.name.rpartition(".")[0] for one in adapters}
    trained = adapters or shard.parameters
    return (
        shard.num_elements,
        len(shard.parameters),
        sum(one.num_elements for one in shard.parameters if is_of_expert(one.name)),
        sum(one.num_elements for one in trained),
        sum(one.num_elements for one in trained if is_of_expert(one.name)),
        sum(one.num_elements for one in shard.parameters if one.name.removesuffix(".weight") in layers),
    )


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a model on a rank, by activity."""

    idle: int
    """Bytes while other models work, with the actor in training mode."""
    infer: int
    update: int
    generating: int
    """Bytes while the actor generates; for the actor, without its engine."""


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of a model's parts on a rank."""

    weights_bytes: int
    gradients_bytes: int
    """Float32 gradients, released during generation."""
    optimizer_bytes: int
    """Moments, and float32 master weights if the weights are not float32; sharded over the replicas of a weight."""
    fp8_bytes: int = 0
    """Copies of the matrices in 8 bits, from the first pass until training is left."""
    trained_bytes: int = 0
    """The weights that are trained: those of adapters, or all of a model without."""
    kept_bytes: int = 0
    """Frozen weights that stay while the engine has them with adapters merged in."""

    def states(self, *, is_actor: bool, offloads: bool, infer: int = 0, update: int = 0) -> StateBytes:
        """Return the bytes by activity, given the bytes of activations of forward passes and of updates."""
        whole = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.fp8_bytes
        kept = 0 if offloads else self.optimizer_bytes
        waiting = self.weights_bytes + kept
        idle = whole if is_actor else waiting + self.fp8_bytes
        return StateBytes(idle, idle + infer, whole + update, kept if is_actor else waiting)


@lru_cache(maxsize=64)
def layer_weights(shape: ModelShape) -> int:
    """Return the number of weights in the matrices of a layer."""
    return sum(math.prod(size) for size in shape.layer_tensors(0).values() if len(size) > 1)


def model_memory(
    shape: ModelShape,
    sizes: TrainSizes,
    dtype: str,
    settings: MegatronSettings = MegatronSettings(),
    *,
    trains: bool = True,
    stage: int | None = None,
) -> ModelMemory:
    """Return the memory of `shape` with the distributed optimizer on a rank of a stage, by default on the fullest; only
    weights if it does not train.
    """
    held = training_holding(shape, sizes, stage)
    num_elements = held.num_elements
    weights_bytes = num_elements * DTYPE_BYTES[dtype]
    if not trains:
        return ModelMemory(weights_bytes, 0, 0)
    dense, each = held.num_trained - held.num_trained_of_experts, optimizer_weight_bytes(dtype)
    optimizer_bytes = -(-dense * each // (sizes.dp_size * sizes.cp_size))
    optimizer_bytes += -(-held.num_trained_of_experts * each // sizes.expert_replicas)
    layers = sum(map(len, shape.split_layers(*sizes.blocks)[:: sizes.pp_size]))
    matrices = layers * layer_weights(shape) // sizes.tp_size
    fp8_bytes = int(matrices * FP8_WEIGHT_BYTES[settings.fp8])
    trained = held.num_trained * DTYPE_BYTES[dtype]
    kept = held.num_adapted * DTYPE_BYTES[dtype] if shape.merges_adapters else 0
    return ModelMemory(
        weights_bytes, held.num_trained * GRADIENT_BYTES, optimizer_bytes, fp8_bytes, trained, kept
    )


def engine_weight_bytes(config: RunConfig) -> int:
    """Return the bytes of weights on the fullest rank of an engine on a pool of its own."""
    gen = config.generation.parallel
    held = generation_holding(model_shape(config), gen.pp_size, gen)
    return held.num_elements * DTYPE_BYTES[config.model.dtype]


def optimizer_weight_bytes(dtype: str) -> int:
    return MOMENT_BYTES + (4 if dtype != "float32" else 0)


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of the tensors in a run's checkpoint: weights and optimizer state of the trained models."""
    dtype = config.model.dtype
    each = DTYPE_BYTES[dtype] + optimizer_weight_bytes(dtype)
    trained = (holder for holder in model_holders(config) if holder.role in TRAINED)
    return sum(each * holder_shape(config, holder).num_trained for holder in trained)
