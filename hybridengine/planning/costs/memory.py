"""Memory of a model's state on one rank: weights, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hybridengine.config import RunConfig, holder_shape, model_holders, model_shape
from hybridengine.config.role_sections import MegatronSettings
from hybridengine.config.run_config import TRAINED
from hybridengine.families.adapters import is_of_adapter
from hybridengine.families.family import NameSet, is_of_expert
from hybridengine.models.shapes import DTYPE_BYTES, FP8_BLOCK, ModelShape
from hybridengine.reshard.layout import LocalParameter, Shard
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
    def shard(shape: ModelShape, num_stages: int, stage: int) -> Shard:
        sizes = TrainSizes(num_stages, tp_size, parts * shards, expert_parts=parts, expert_shards=shards)
        return megatron_shard(shape, sizes, (stage, 0, 0, 0), NameSet.LOCAL)

    return _fullest(shape, shape.split_layers(pp_size), parts, shard, stages)


@lru_cache(maxsize=4096)
def generation_holding(shape: ModelShape, train_pp_size: int, gen: GenSizes) -> Holding:
    """Return the parameters of an engine's rank at `gen`, given `train_pp_size` training stages."""

    def shard(shape: ModelShape, num_stages: int, stage: int) -> Shard:
        return vllm_shard(shape, shape.split_layers(num_stages), stage, 0, gen)

    stages = shape.gen_stage_layers(train_pp_size, gen.pp_size)
    return _fullest(shape, stages, gen.expert_parts, shard, _busy_stages(gen.pp_size))


@lru_cache(maxsize=4096)
def generation_bytes(
    shape: ModelShape, train_pp_size: int, gen: GenSizes, dtype: str, quantization: str = "none"
) -> int:
    """Return the bytes of weights on the fullest rank of an engine at `gen`, given `train_pp_size` training stages.

    Quantized matrices of layers have one byte for an element, and a float32 scale for each block.
    """
    if quantization == "none":
        return generation_holding(shape, train_pp_size, gen).num_elements * DTYPE_BYTES[dtype]
    stages = shape.gen_stage_layers(train_pp_size, gen.pp_size)

    def num_bytes(parameter: LocalParameter) -> int:
        if not parameter.name.endswith("_proj.weight"):
            return parameter.num_elements * DTYPE_BYTES[dtype]
        rows, columns = parameter.shape
        return rows * columns + 4 * (-(-rows // FP8_BLOCK)) * (-(-columns // FP8_BLOCK))

    shards = (vllm_shard(shape, stages, stage, 0, gen) for stage in _busy_stages(gen.pp_size))
    return max(sum(map(num_bytes, shard.parameters)) for shard in shards)


def _busy_stages(pp_size: int) -> tuple[int, ...]:
    """Return the stages that may be the fullest: the first, the second (with the most inner layers) and the last."""
    return tuple(sorted({0, min(1, pp_size - 1), pp_size - 1}))


def _fullest(
    shape: ModelShape,
    stages: tuple[range, ...],
    parts: int,
    shard: Callable[[ModelShape, int, int], Shard],
    numbers: tuple[int, ...],
) -> Holding:
    """Return the most that any of the stages `numbers` holds, given the shard of a stage of a model with as many stages.

    Layers of a kind are equal, and so are experts: models of few layers, with one or two experts in each of `parts`, are
    counted, and what a layer more adds.
    """
    mixed, dense, ends = _layers(shape, parts, shard)
    found = []
    for stage in numbers:
        place = (len(stages) > 1) + (0 < stage < len(stages) - 1), min(stage, 1)
        num_mixed = sum(shape.expert_layer(layer) is not None for layer in stages[stage])
        num_dense = len(stages[stage]) - num_mixed
        found.append(ends[place] + num_mixed * mixed + num_dense * dense)
    return Holding(*np.max(found, axis=0).tolist())


def _layers(
    shape: ModelShape, parts: int, shard: Callable[[ModelShape, int, int], Shard]
) -> tuple[np.ndarray, np.ndarray, dict[tuple[int, int], np.ndarray]]:
    """Return the counts of a layer with experts and of one with an MLP, and those of a stage's other parameters."""
    one = _counts(shard(_small(shape, 1, 0, parts), 1, 0))
    mixed = single = _counts(shard(_small(shape, 2, 0, parts), 1, 0)) - one
    dense = single
    if shape.experts:
        more = _counts(shard(_small(shape, 1, 0, 2 * parts), 1, 0)) - one  # an expert more in each part
        mixed = single + (shape.experts.num_experts // parts - 1) * more
        dense = _counts(shard(_small(shape, 2, 1, parts), 1, 0)) - one
    places = (
        ((0, 0), 1),
        ((1, 0), 2),
        ((1, 1), 2),
        ((2, 1), 3),
    )  # the only, the first, the last and an inner stage
    ends = {
        place: _counts(shard(_small(shape, num_stages, 0, parts), num_stages, place[1])) - single
        for place, num_stages in places
    }
    return mixed, dense, ends


@lru_cache(maxsize=256)
def _small(shape: ModelShape, num_layers: int, num_dense: int, num_experts: int) -> ModelShape:
    """Return the shape with fewer layers, of which the first have an MLP in place of experts, and fewer experts."""
    experts = shape.experts
    if experts is not None:
        experts = replace(experts, num_dense_layers=num_dense, num_experts=num_experts)
    return replace(shape, num_layers=num_layers, experts=experts)


def _counts(shard: Shard) -> np.ndarray:
    """Return the fields of `Holding` for a shard."""
    adapters = [one for one in shard.parameters if is_of_adapter(one.name)]
    layers = {one.name.rpartition(".")[0] for one in adapters}
    trained = adapters or shard.parameters
    return np.array(
        [
            shard.num_elements,
            len(shard.parameters),
            sum(one.num_elements for one in shard.parameters if is_of_expert(one.name)),
            sum(one.num_elements for one in trained),
            sum(one.num_elements for one in trained if is_of_expert(one.name)),
            sum(one.num_elements for one in shard.parameters if one.name.removesuffix(".weight") in layers),
        ]
    )


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a model on a rank, by activity."""

    idle: int
    """Bytes while other models work, without gradients and offloaded state, which are there in updates alone."""
    infer: int
    update: int
    generating: int
    """Bytes while the actor generates; for the actor, without its engine."""


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of a model's parts on a rank."""

    weights_bytes: int
    gradients_bytes: int
    """Float32 gradients, which have memory during updates."""
    optimizer_bytes: int
    """Moments, and float32 master weights if the weights are not float32; sharded over the replicas of a weight."""
    fp8_bytes: int = 0
    """Copies of the matrices in 8 bits, from the first pass until training is left."""
    trained_bytes: int = 0
    """The weights that are trained: those of adapters, or all of a model without."""
    kept_bytes: int = 0
    """Frozen weights that stay while the engine has them with adapters merged in."""

    def states(self, *, is_actor: bool, offload: str, infer: int = 0, update: int = 0) -> StateBytes:
        """Return the bytes by activity, given the bytes of activations of forward passes and of updates.

        Args:
            offload: what is in host memory: `none`; `optimizer`, but for updates; or `weights`, of a model that does not
                train, but for its passes.
        """
        if offload == "weights":
            return StateBytes(0, self.weights_bytes + infer, 0, 0)
        whole = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.fp8_bytes
        kept = 0 if offload == "optimizer" else self.optimizer_bytes
        idle = self.weights_bytes + kept + self.fp8_bytes
        generating = kept if is_actor else self.weights_bytes + kept
        return StateBytes(idle, idle + infer, whole + update, generating)


@dataclass(frozen=True)
class LayerWeights:
    """Number of weights in the matrices of layers."""

    every: int
    """Those that compute every token: of attention, router and MLP."""
    experts: int = 0
    """Those of all experts."""
    active: int = 0
    """Those of the experts that compute one token."""
    attention: int = 0
    """Those of `every` that belong to attention."""

    @property
    def of_token(self) -> int:
        """Number of weights that compute one token."""
        return self.every + self.active


@lru_cache(maxsize=256)
def layer_weights(shape: ModelShape, layers: range = range(1)) -> LayerWeights:
    """Return the weights of some layers together, by default of the first."""
    num_mixed = sum(shape.expert_layer(layer) is not None for layer in layers)
    every = experts = 0
    for count, layer in ((len(layers) - num_mixed, 0), (num_mixed, shape.num_layers - 1)):
        if count:
            matrices = {name: size for name, size in shape.layer_tensors(layer).items() if len(size) > 1}
            routed = sum(math.prod(size) for name, size in matrices.items() if is_of_expert(name))
            every += count * (sum(map(math.prod, matrices.values())) - routed)
            experts += count * routed
    active = experts * shape.experts.num_active // shape.experts.num_experts if shape.experts else 0
    attention = 2 * len(layers) * shape.hidden_size * (shape.q_size + shape.kv_size)
    return LayerWeights(every, experts, active, attention)


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
    weights = [layer_weights(shape, block) for block in shape.split_layers(*sizes.blocks)[:: sizes.pp_size]]
    matrices = sum(
        own.every // sizes.tp_size + own.experts // (sizes.expert_parts * sizes.expert_shards)
        for own in weights
    )
    fp8_bytes = int(matrices * FP8_WEIGHT_BYTES[settings.fp8])
    trained = held.num_trained * DTYPE_BYTES[dtype]
    kept = held.num_adapted * DTYPE_BYTES[dtype] if shape.merges_adapters else 0
    return ModelMemory(
        weights_bytes, held.num_trained * GRADIENT_BYTES, optimizer_bytes, fp8_bytes, trained, kept
    )


def engine_shape(config: RunConfig) -> ModelShape:
    """Return the shape of what engines get from the actor: without adapters, if they load these from files."""
    shape = model_shape(config)
    return shape.with_adapters(None) if config.num_loaded_adapters else shape


def engine_weight_bytes(config: RunConfig) -> int:
    """Return the bytes of weights on the fullest rank of an engine on a pool of its own."""
    gen = config.generation.parallel
    return generation_bytes(
        engine_shape(config), gen.pp_size, gen, config.model.dtype, config.rollout.quantization
    )


def optimizer_weight_bytes(dtype: str) -> int:
    return MOMENT_BYTES + (4 if dtype != "float32" else 0)


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of the tensors in a run's checkpoint: weights and optimizer state of the trained models."""
    dtype = config.model.dtype
    each = DTYPE_BYTES[dtype] + optimizer_weight_bytes(dtype)
    trained = (holder for holder in model_holders(config) if holder.role in TRAINED)
    return sum(each * holder_shape(config, holder).num_trained for holder in trained)
