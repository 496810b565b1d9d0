"""Memory of a model on one rank: weights, gradients, optimizer state, and activations of a micro-batch.

Activations are counted tensor by tensor, as Megatron-core keeps them for a layer: inputs of norms and matrices, and
intermediate results. All are divided by t, hidden states only with sequence parallelism.

Source: Korthikanti et al., arXiv 2205.05198, section 4, adapted to grouped queries and gated MLPs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from hybridengine.config import RunConfig, holder_shape, model_holders, model_shape
from hybridengine.config.run_config import TRAINED
from hybridengine.families.family import NameSet
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.costs.lengths import MicroBatches
from hybridengine.reshard.layout import Shard
from hybridengine.reshard.megatron import megatron_shard
from hybridengine.reshard.vllm import vllm_shard
from hybridengine.topology.sizes import TrainSizes

GRADIENT_BYTES = 4
MOMENT_BYTES = 8
"""Bytes of Adam's two moments in float32."""
LOGIT_COPIES = 3
"""Number of float32 tensors of a block of logits for log-probs and entropies: logits, softmax, gradient."""
LOGIT_BLOCK = 2**25
"""Largest number of logits that exist at a time, as in backends/predictions.py."""


@dataclass(frozen=True)
class Holding:
    num_elements: int
    num_parameters: int
    """Number of parameter tensors."""


def training_holding(shape: ModelShape, sizes: TrainSizes) -> Holding:
    """Return the parameters that a rank trains; t divides evenly, so that the ranks of a stage are equal.

    Virtual stages have no influence: whatever v is, a stage has layers / p layers, one more if it is among the first.
    """
    return _stage_holding(shape, sizes.pp_size, sizes.tp_size)


@lru_cache(maxsize=4096)
def _stage_holding(shape: ModelShape, pp_size: int, tp_size: int) -> Holding:
    sizes = TrainSizes(pp_size, tp_size, 1)
    return _most(megatron_shard(shape, sizes, stage, 0, NameSet.LOCAL) for stage in _busy_stages(pp_size))


@lru_cache(maxsize=4096)
def generation_holding(shape: ModelShape, train_pp_size: int, pp_size: int, tp_size: int) -> Holding:
    """Return the parameters of an engine's rank at (p_g, t_g), given `train_pp_size` training stages."""
    stages = shape.gen_stage_layers(train_pp_size, pp_size)
    return _most(vllm_shard(shape, stages, stage, 0, tp_size) for stage in _busy_stages(pp_size))


def _busy_stages(pp_size: int) -> list[int]:
    """Return the stages that may be the fullest: the first, the second (with the most inner layers) and the last."""
    return sorted({0, min(1, pp_size - 1), pp_size - 1})


def _most(shards: Iterable[Shard]) -> Holding:
    counts = [(shard.num_elements, len(shard.parameters)) for shard in shards]
    return Holding(*map(max, zip(*counts, strict=True)))


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a model on the fullest rank, by activity."""

    idle: int
    """Bytes while other models work, with the actor in training mode."""
    infer: int
    update: int
    generating: int
    """Bytes while the actor generates; for the actor, without its engine."""


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of a model's parts on the fullest rank."""

    weights_bytes: int
    gradients_bytes: int
    """Float32 gradients, released during generation."""
    optimizer_bytes: int
    """Moments, and float32 master weights if the weights are not float32; sharded over d·c."""

    def states(self, *, is_actor: bool, offloads: bool, infer: int = 0, update: int = 0) -> StateBytes:
        """Return the bytes by activity, given the bytes of activations of forward passes and of updates."""
        whole = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        kept = 0 if offloads else self.optimizer_bytes
        idle = whole if is_actor else self.weights_bytes + kept
        return StateBytes(idle, idle + infer, whole + update, kept if is_actor else idle)


def model_memory(shape: ModelShape, sizes: TrainSizes, dtype: str, *, trains: bool = True) -> ModelMemory:
    """Return the memory of `shape` with the distributed optimizer; only weights if it does not train."""
    num_elements = training_holding(shape, sizes).num_elements
    weights_bytes = num_elements * DTYPE_BYTES[dtype]
    if not trains:
        return ModelMemory(weights_bytes, 0, 0)
    optimizer_bytes = -(-num_elements * optimizer_weight_bytes(dtype) // (sizes.dp_size * sizes.cp_size))
    return ModelMemory(weights_bytes, num_elements * GRADIENT_BYTES, optimizer_bytes)


def engine_weight_bytes(config: RunConfig) -> int:
    """Return the bytes of weights on the fullest rank of an engine on a pool of its own."""
    gen = config.generation.parallel
    held = generation_holding(model_shape(config), gen.pp_size, gen.pp_size, gen.tp_size)
    return held.num_elements * DTYPE_BYTES[config.model.dtype]


def optimizer_weight_bytes(dtype: str) -> int:
    return MOMENT_BYTES + (4 if dtype != "float32" else 0)


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of the tensors in a run's checkpoint: weights and optimizer state of the trained models."""
    dtype = config.model.dtype
    each = DTYPE_BYTES[dtype] + optimizer_weight_bytes(dtype)
    trained = (holder for holder in model_holders(config) if holder.role in TRAINED)
    return sum(each * holder_shape(config, holder).num_parameters for holder in trained)


def layer_activations(shape: ModelShape, tp_size: int, hidden_parts: int) -> float:
    """Return the elements per token that a layer keeps on a rank; hidden states are divided by `hidden_parts`."""
    hidden = 4 * shape.hidden_size  # inputs of both norms, of the query projection and of the MLP
    attention = 2 * shape.q_size + 2 * shape.kv_size + shape.q_size  # before and after rotation; output
    mlp = 3 * shape.ffn_hidden_size  # gate, up, and their product
    return hidden / hidden_parts + (attention + mlp) / tp_size


def activation_bytes(
    shape: ModelShape,
    sizes: TrainSizes,
    dtype: str,
    micro: MicroBatches,
    *,
    trains: bool,
    recompute: str = "none",
    sequence_parallel: bool = True,
) -> int:
    """Return the most bytes of activations that a pass keeps on a rank; `recompute` and `sequence_parallel` are those of
    `MegatronSettings`.

    The fullest stage is the first, with the most micro-batches in flight, or the last, with blocks of logits.
    """
    element, tokens = DTYPE_BYTES[dtype], micro.tokens / sizes.cp_size
    p, v = sizes.pp_size, sizes.virtual_stages
    layers = len(shape.split_layers(*sizes.blocks)[0])
    hidden_parts = sizes.tp_size if sequence_parallel else 1
    one_layer = layer_activations(shape, sizes.tp_size, hidden_parts)
    if not trains:
        first = last = one_layer
    else:
        # Recomputation needs one layer of one micro-batch at a time.
        hidden = shape.hidden_size / hidden_parts
        mlp = 3 * shape.ffn_hidden_size / sizes.tp_size
        each, again = {
            "none": (one_layer, 0.0),
            "selective": (one_layer - mlp, mlp),
            "full": (hidden, one_layer),
        }[recompute]
        kept = each * layers
        # Passes of a block of layers before the first backward pass: p, or those of the interleaved schedule.
        count = sizes.num_passes(micro.count)
        own = (v - 1) * sizes.passes_per_block(count) if v > 1 else 0
        first_passes, last_passes = (p, 1) if v == 1 else (2 * (p - 1) + own + 1, own + 1)
        most = count * v
        first, last = kept * min(first_passes, most) + again, kept * min(last_passes, most) + again
    logits = 0.0
    if not shape.num_labels:
        copies, width = LOGIT_COPIES if trains else LOGIT_COPIES - 1, shape.vocab_size / sizes.tp_size
        logits = copies * 4 * min(LOGIT_BLOCK, micro.response_tokens / sizes.cp_size * width)
        if trains:  # the weight's gradient, summed over blocks in float32
            logits += (4 + element) * width * shape.hidden_size
    return int(max(first * element * tokens, last * element * tokens + logits))
