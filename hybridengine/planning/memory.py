"""Memory of a model on one rank: weights, gradients, optimizer state, and what a pass over a micro-batch keeps.

Activations are counted tensor by tensor, as Megatron-core keeps them for a layer without sequence parallelism: inputs
of the norms and of the matrices, and what lies between. Sharded ones are divided by t, those of the hidden state are not.

Source: Korthikanti et al., arXiv 2205.05198, section 4, redone for grouped queries and gated MLPs.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridengine.model_shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.passes import MicroBatches
from hybridengine.planning.shards import training_holding
from hybridengine.topology.sizes import TrainSizes

GRADIENT_BYTES = 4
MOMENT_BYTES = 8
"""Adam's two moments in float32."""
LOGIT_COPIES = 3
"""Float32 tensors of logits' size that log-probs and entropies keep: logits, their softmax, their gradient."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of the rank with the most, for a model that is trained."""

    weights_bytes: int
    gradients_bytes: int
    """Float32, released while generating."""
    optimizer_bytes: int
    """Moments, and float32 master weights where the weights are not float32; sharded over d."""


def training_memory(shape: ModelShape, sizes: TrainSizes, dtype: str) -> TrainingMemory:
    """Memory of training `shape` at (p, t, d) under the distributed optimizer."""
    num_elements = training_holding(shape, sizes.pp_size, sizes.tp_size).num_elements
    per_weight = MOMENT_BYTES + (4 if dtype != "float32" else 0)
    return TrainingMemory(
        weights_bytes=num_elements * DTYPE_BYTES[dtype],
        gradients_bytes=num_elements * GRADIENT_BYTES,
        optimizer_bytes=-(-num_elements * per_weight // sizes.dp_size),
    )


def layer_activations(shape: ModelShape, tp_size: int) -> float:
    """Elements that a layer keeps of each token for its backward pass, scores of attention left out."""
    hidden = 4 * shape.hidden_size  # inputs of both norms, of the query projection and of the MLP
    attention = 2 * shape.q_size + 2 * shape.kv_size + shape.q_size  # rotated and not, and attention's output
    mlp = 3 * shape.ffn_hidden_size  # gate, up, and their product
    return hidden + (attention + mlp) / tp_size


def activation_bytes(
    shape: ModelShape,
    sizes: TrainSizes,
    dtype: str,
    micro: MicroBatches,
    *,
    trains: bool,
    recompute: bool = False,
    scores: bool = False,
) -> int:
    """Most bytes that a pass keeps on a rank: of the first stage, with as many micro-batches as are under way, or of the
    last one, with its logits.

    Args:
        trains: activations are kept for a backward pass.
        recompute: only the input of each layer is.
        scores: attention keeps its [length, length] matrices, as without a fused kernel.
    """
    element = DTYPE_BYTES[dtype]
    layers = len(shape.split_layers(sizes.pp_size)[0])
    one_layer = layer_activations(shape, sizes.tp_size)
    if scores:
        one_layer += 2 * shape.num_heads * micro.length / sizes.tp_size
    if not trains:
        first = last = one_layer
    else:
        # Of what is computed again, there is one layer at a time, of one micro-batch.
        kept, again = (shape.hidden_size * layers, one_layer) if recompute else (one_layer * layers, 0.0)
        first, last = kept * min(sizes.pp_size, micro.count) + again, kept + again
    logits = 0.0
    if not shape.num_labels:
        copies = LOGIT_COPIES if trains else LOGIT_COPIES - 1
        logits = copies * 4 * micro.response_tokens * shape.vocab_size / sizes.tp_size
    return int(max(first * element * micro.tokens, last * element * micro.tokens + logits))
