"""Bytes of activations of a pass on one rank, counted tensor by tensor: what Transformer Engine's layers keep.

    norms          input, and a float32 number for each row; of queries and keys, where a family has these norms
    matrices       input; that of queries, keys and values, and that of gate and up are outputs of norms
    attention      queries, keys and values behind the rotation, output, and a float32 number for each query and head
    gated MLP      gate and up; their product is the input of the last matrix
    stage          what it sends to the next one, until the backward pass of the micro-batch

What belongs to heads or to the MLP is divided by t, and with sequence parallelism hidden states are too. The norm before
the MLP is part of it, and computed again with it. In the backward pass, a layer's MLP needs most beside what is kept.
Layers without Transformer Engine, as on a CPU, keep more; with FP8, a matrix keeps its input in 8 bits, which is not
counted. `mixtures` has the layers with experts.

Source: Korthikanti et al., arXiv 2205.05198, section 4, adapted to grouped queries and gated MLPs, and the source of
Transformer Engine 2.20 (`module/layernorm_linear.py`, `attention/`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridengine.config.role_sections import MegatronSettings
from hybridengine.families.registry import FAMILIES
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.costs.lengths import MicroBatches
from hybridengine.planning.costs.mixtures import mixture_bytes
from hybridengine.topology.sizes import TrainSizes

LOGIT_BUFFERS = 2
"""Blocks of logits in float32 for log-probs and entropies, beside one in the model's type (backends/predictions.py)."""
LOGIT_BLOCK = 2**25
"""Largest number of logits that exist at a time, as there."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of a layer on a rank."""

    hidden: float
    """A hidden state, or the rank's part of it."""
    attention: float
    """Kept for the backward pass of the first norm and of attention, with the input of the MLP and its norm."""
    mlp: float
    """Kept for that of the MLP and its norm: the norm's output, gate, up and their product."""
    working: float
    """Most that exists beside it in the backward pass."""
    forward: float
    """Most that exists in a pass that keeps nothing."""

    @property
    def kept(self) -> float:
        return self.attention + self.mlp


def layer_bytes(
    shape: ModelShape, tp_size: int, dtype: str, settings: MegatronSettings = MegatronSettings()
) -> LayerBytes:
    """Return the bytes of a layer at t = `tp_size`."""
    element = DTYPE_BYTES[dtype]
    parts = tp_size if settings.sequence_parallel else 1
    whole = shape.hidden_size * element
    hidden, gathered = whole / parts, whole if parts > 1 else 0
    heads = (2 * shape.q_size + 2 * shape.kv_size) * element + 4 * shape.num_heads
    if FAMILIES[shape.family].qk_norm:
        heads += (shape.q_size + shape.kv_size) * element + 4 * (shape.num_heads + shape.num_kv_heads)
    ffn = shape.ffn_hidden_size * element / tp_size
    # Beside the gradient of the hidden state: gradients of the product and, gathered, of the output; those of gate and up
    # in place of the product; the input, gathered, and its gradient in place of gate and up.
    working = hidden + max(ffn + gathered, 2 * ffn, whole + gathered - ffn)
    forward = 2 * hidden + max(3 * ffn, gathered + 2 * ffn, ffn + whole)
    norm = hidden + 4 / parts
    post_norm = norm if FAMILIES[shape.family].post_norms else 0
    attention = 2 * hidden + norm + heads / tp_size + post_norm
    return LayerBytes(hidden, attention, norm + 3 * ffn + post_norm, working, forward)


def mixed_layer_bytes(
    shape: ModelShape, sizes: TrainSizes, dtype: str, settings: MegatronSettings = MegatronSettings()
) -> LayerBytes:
    """Return the bytes of a layer with experts, whose norm is a layer of its own: its output is kept as well."""
    alone = layer_bytes(replace(shape, ffn_hidden_size=0), sizes.tp_size, dtype, settings)
    behind = mixture_bytes(shape, sizes, dtype, sequence_parallel=settings.sequence_parallel)
    return LayerBytes(
        alone.hidden,
        alone.kept,
        behind.kept - alone.hidden,  # the norm's output is one of the inputs of matrices
        max(alone.working, alone.hidden + behind.working),
        max(alone.forward, behind.forward),
    )


def activation_bytes(
    shape: ModelShape,
    sizes: TrainSizes,
    dtype: str,
    micro: MicroBatches,
    settings: MegatronSettings = MegatronSettings(),
    *,
    trains: bool,
    stage: int | None = None,
) -> int:
    """Return the most bytes of activations of a pass on a rank of a stage, by default of the fullest.

    That is the first, with the most micro-batches in flight, or the last, with blocks of logits.
    """
    tokens = micro.tokens / sizes.cp_size
    p = sizes.pp_size
    if stage is None:
        each = (
            activation_bytes(shape, sizes, dtype, micro, settings, trains=trains, stage=one)
            for one in (0, p - 1)
        )
        return max(each)
    dense = layer_bytes(shape, sizes.tp_size, dtype, settings)
    mixed = mixed_layer_bytes(shape, sizes, dtype, settings) if shape.experts else dense
    head = _head_bytes(shape, sizes, dtype, micro, settings, trains=trains) if stage == p - 1 else 0
    if not trains:
        return int(max(dense.forward * tokens, mixed.forward * tokens, head))
    kept, beside = 0.0, 0.0
    for block in shape.split_layers(*sizes.blocks)[stage::p]:
        layers = [mixed if shape.expert_layer(number) else dense for number in block]
        each_kept, each_beside = zip(*(_kept(layer, settings.recompute) for layer in layers), strict=True)
        kept, beside = max(kept, sum(each_kept)), max(beside, *each_beside)
    flights = sizes.passes_in_flight(micro.count, stage)
    # Messages overlap with computing: inputs received ahead and gradients on their way, of blocks that have such.
    ahead = 2 * min(sizes.virtual_stages - 1, 2) * dense.hidden
    sent = flights - (stage == p - 1)  # the last block alone sends no output
    return int((flights * kept + sent * dense.hidden) * tokens + max((beside + ahead) * tokens, head))


def _kept(layer: LayerBytes, recompute: str) -> tuple[float, float]:
    """Return what a layer keeps, and the most that exists beside it: what is computed again, with its output."""
    return {
        "none": (layer.kept, layer.working),
        "selective": (layer.attention, layer.mlp + layer.hidden + layer.working),
        "full": (layer.hidden, layer.kept + layer.working),
    }[recompute]


def _head_bytes(
    shape: ModelShape,
    sizes: TrainSizes,
    dtype: str,
    micro: MicroBatches,
    settings: MegatronSettings,
    *,
    trains: bool,
) -> float:
    """Return the bytes of the last norm and the head, while these compute."""
    element, t = DTYPE_BYTES[dtype], sizes.tp_size
    parts = t if settings.sequence_parallel else 1
    hidden = micro.tokens / sizes.cp_size * shape.hidden_size * element
    if shape.num_labels:
        return 2 * hidden / parts + (hidden if parts > 1 else 0)
    outputs, width = micro.response_tokens / sizes.cp_size, shape.vocab_size / t
    logit = 4 * LOGIT_BUFFERS + (element if dtype != "float32" else 0)
    needed = (
        hidden / parts + outputs * shape.hidden_size * element + logit * min(LOGIT_BLOCK, outputs * width)
    )
    if trains:  # gradients of the hidden states, and of the weight, summed over blocks in float32
        needed += outputs * shape.hidden_size * element + (4 + element) * width * shape.hidden_size
    return needed
