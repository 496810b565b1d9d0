"""Costs of mixture-of-experts layers: what they keep, and how long tokens take to their experts and back.

A router chooses `num_active` experts for each token. With sequence parallelism, which Megatron-core requires for t > 1, a
rank has n tokens; copies of them, n·num_active rows, go to the experts:

    router       keeps its input, the norm's output; the chosen experts' numbers and probabilities; and for each token and
                 expert a probability and a mark, twice: for the backward pass, and until the layer's next pass
    dispatcher   keeps the order of the rows. It sorts rows by expert (`permute`), sends them to the e parts (all-to-all),
                 gathers those of the etp shards (all-gather), sorts them by the rank's experts; and back the same way
    experts      Transformer Engine's grouped matrices keep their inputs, the rows and the product of gate and up; the
                 product's function keeps gate and up, and the probability of each row
    shared       an MLP sharded over t, as that of a dense layer: it keeps gate, up and their product, and its output
                 exists until that of the experts is added

All experts are assumed to get equally many tokens; a run's fullest rank has more. Recomputation of MLPs
(`recompute=selective`) computes the whole layer behind the norm again, with its messages.

Source: Megatron-core 0.16.1, `transformer/moe/` (`moe_layer.py`, `router.py`, `moe_utils.py`, `token_dispatcher.py`:
`MoEAlltoAllTokenDispatcher`, `experts.py`: `TEGroupedMLP`), `fusions/fused_bias_swiglu.py`, and Transformer Engine 2.20,
`module/grouped_linear.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridengine.families.sizes import ExpertSizes
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.costs.clusters import Axis, Fabric
from hybridengine.topology.sizes import GenSizes, TrainSizes

INDEX_BYTES = 8
"""Bytes of torch's indices."""


@dataclass(frozen=True)
class MixtureBytes:
    """Bytes per token of a mixture's layer behind its norm, on a rank with all of them."""

    kept: float
    """Kept for the backward pass, with the norm's output and without its input."""
    working: float
    """Most that exists beside it, in either pass, without the gradient of the hidden state."""
    forward: float
    """Most that exists in a pass that keeps nothing."""


def mixture_bytes(
    shape: ModelShape, sizes: TrainSizes, dtype: str, *, sequence_parallel: bool
) -> MixtureBytes:
    """Return the bytes of a layer's router, dispatcher and experts, for each token that t ranks have together."""
    experts, element = _experts_of(shape), DTYPE_BYTES[dtype]
    parts = sizes.tp_size if sequence_parallel else 1
    rows = experts.num_active * sizes.expert_shards
    hidden, arrived = shape.hidden_size * element, rows * shape.hidden_size * element
    sent, product = (
        arrived / sizes.expert_shards,
        rows * experts.ffn_hidden_size * element / sizes.expert_shards,
    )
    # Softmax is over the chosen experts alone if their weights add up to 1.
    probabilities = 4 * (experts.num_active if experts.normalizes else experts.num_experts)
    routing = probabilities + 2 * INDEX_BYTES * experts.num_active + 2 * (element + 1) * experts.num_experts
    shared, shared_output = 3 * experts.shared_size * element, hidden if experts.shared_size else 0
    kept = hidden + routing + arrived + rows * element + 3 * product + shared
    # The rows sent, and those received, live until the layer returns; the experts' output exists in two orders, and
    # beside the result of a reduce-scatter, for which NCCL copies equal parts into one tensor.
    outside = shared_output + sent * (2 if sizes.expert_parts > 1 else 1)
    outputs = 2 * arrived
    if sizes.expert_shards > 1:
        outputs += sent + (arrived if sizes.expert_parts == 1 else 0)
    working = max(outside + outputs, arrived + product, 2 * product)
    forward = 2 * hidden + routing + outside + arrived + max(3 * product + arrived, outputs)
    return MixtureBytes(kept / parts, working / parts, forward / parts)


def dispatch_s(fabric: Fabric, shape: ModelShape, sizes: TrainSizes, tokens: float, dtype: str) -> float:
    """Return the seconds in which the `tokens` of t ranks reach the experts of a layer and come back, in one direction.

    The backward pass takes as long: gradients go the same ways.
    """
    experts, element = _experts_of(shape), DTYPE_BYTES[dtype]
    rows = tokens / sizes.tp_size * experts.num_active
    parts = stage_axes(sizes, sizes.expert_parts, sizes.expert_shards)
    shards, arrived = stage_axes(sizes, sizes.expert_shards, 1), rows * sizes.expert_shards
    hidden_s = 2 * fabric.all_to_all_s(rows * shape.hidden_size * element, *parts)
    # An all-gather of the rows and a reduce-scatter of the experts' output.
    shards_s = fabric.all_reduce_s(arrived * shape.hidden_size * element, *shards)
    probabilities_s = fabric.all_to_all_s(rows * element, *parts) + fabric.all_gather_s(
        arrived * element, *shards
    )
    return hidden_s + shards_s + probabilities_s


def sorted_bytes(shape: ModelShape, sizes: TrainSizes, tokens: float, dtype: str) -> float:
    """Return the bytes that a layer's forward pass reads and writes to sort the rows of t ranks' `tokens`, on a rank."""
    sent = tokens / sizes.tp_size * _experts_of(shape).num_active * shape.hidden_size * DTYPE_BYTES[dtype]
    return 2 * sent + 4 * sent * sizes.expert_shards


def expert_rows(shape: ModelShape, sizes: TrainSizes, tokens: float) -> float:
    """Return the mean number of rows of an expert, given the `tokens` of t ranks."""
    experts, ranks = _experts_of(shape), sizes.expert_parts * sizes.expert_shards
    return ranks * tokens / sizes.tp_size * experts.num_active / experts.num_experts


def stage_axes(sizes: TrainSizes, size: int, stride: int) -> tuple[Axis, ...]:
    """Return the axes of groups of `size` ranks of a stage at a distance of `stride`, tp fastest, then cp, then dp.

    In the paper's order of ranks the t·c ranks of a replica's stage are consecutive; those of the next replica follow
    after p·t·c.
    """
    block = sizes.tp_size * sizes.cp_size
    within = max(
        number
        for number in range(1, size + 1)
        if (size % number == 0 and number * stride <= block) or number == 1
    )
    outer = max(1, within * stride // block) * block * sizes.pp_size
    return Axis(within, stride if within > 1 else 1), Axis(size // within, outer)


def replica_axes(sizes: TrainSizes) -> tuple[Axis, ...]:
    """Return the axes of the ranks that hold the same shards of experts."""
    return stage_axes(sizes, sizes.expert_replicas, sizes.expert_parts * sizes.expert_shards)


def engine_axes(sizes: TrainSizes, gen: GenSizes) -> tuple[Axis, ...]:
    """Return the axes of an engine's tensor ranks, which follow the parts of experts (`GenerationGrid`) if they can."""
    follows = gen.expert_parts > 1 and sizes.expert_shards == 1 and sizes.expert_parts % gen.expert_parts == 0
    if follows and sizes.pp_size % gen.pp_size == 0:
        return stage_axes(sizes, gen.tp_size, sizes.expert_parts // gen.tp_size)
    return (Axis(gen.tp_size, 1),)


def touched_share(shape: ModelShape, num_rows: float) -> float:
    """Return the expected share of a layer's experts that compute any of `num_rows` tokens (an array has shares)."""
    experts = _experts_of(shape)
    return 1 - (1 - experts.num_active / experts.num_experts) ** num_rows


def _experts_of(shape: ModelShape) -> ExpertSizes:
    assert shape.experts is not None, "the model is a mixture of experts"
    return shape.experts
