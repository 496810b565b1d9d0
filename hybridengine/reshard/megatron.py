"""The layout of Megatron-core's GPTModel under (p, t, d), in both of its parameter name sets.

Rows of a fused parameter, per tensor-parallel rank:

    linear_qkv   for each KV group: its query heads, its key head, its value head
    linear_fc1   gate rows, then up rows
    word_embeddings, output_layer   an equal share of the vocabulary, padded to a multiple of 64 and of t

With tied embeddings and more than one pipeline stage, the last stage holds a copy of the embedding as `output_layer`.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from hybridengine.model_shapes import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    SCORE_HEAD,
    ModelShape,
    padded_vocab_size,
)
from hybridengine.reshard.layout import Layout, LocalParameter, Shard, row_stack, sharded, vocab_shard, whole
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import MODEL_AXES


class NameSet(str, Enum):
    """Which of Megatron's layer specs named the parameters."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"
    """The norms before QKV and before the MLP are fused into the linear layers that follow them."""


_NORM_NAMES = {
    NameSet.LOCAL: ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    NameSet.TRANSFORMER_ENGINE: (
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
    ),
}


@lru_cache(maxsize=16)
def megatron_layout(shape: ModelShape, grid: Grid, names: NameSet = NameSet.LOCAL) -> Layout:
    """Layout of a GPTModel over the ranks of `grid`."""
    keys = {rank: place.along(MODEL_AXES) for rank, place in enumerate(grid.coordinates())}
    shards = {
        (pp_rank, tp_rank): megatron_shard(
            shape, pp_rank, grid.sizes.pp_size, tp_rank, grid.sizes.tp_size, names
        )
        for pp_rank, tp_rank in sorted(set(keys.values()))
    }
    return Layout(shape, keys, shards, kind=f"megatron {grid.sizes}")


def megatron_shard(
    shape: ModelShape, pp_rank: int, pp_size: int, tp_rank: int, tp_size: int, names: NameSet
) -> Shard:
    """Parameters of the rank at (`pp_rank`, `tp_rank`)."""
    padded = padded_vocab_size(shape.vocab_size, tp_size)
    vocab_shape = shape.tensors[EMBEDDING]
    parameters: list[LocalParameter] = []
    if pp_rank == 0:
        parameters.append(
            vocab_shard("embedding.word_embeddings.weight", EMBEDDING, vocab_shape, padded, tp_rank, tp_size)
        )
    for index, layer in enumerate(shape.split_layers(pp_size)[pp_rank]):
        parameters += _layer(shape, f"decoder.layers.{index}.", layer, tp_rank, tp_size, names)
    if pp_rank == pp_size - 1:
        parameters.append(whole("decoder.final_layernorm.weight", FINAL_NORM, shape.tensors[FINAL_NORM]))
        if shape.num_labels:
            parameters.append(whole("output_layer.weight", SCORE_HEAD, shape.tensors[SCORE_HEAD]))
        elif not shape.tied_embeddings or pp_size > 1:
            head = EMBEDDING if shape.tied_embeddings else LM_HEAD
            parameters.append(vocab_shard("output_layer.weight", head, vocab_shape, padded, tp_rank, tp_size))
    return Shard(tuple(parameters))


def _layer(
    shape: ModelShape, prefix: str, layer: int, tp_rank: int, tp_size: int, names: NameSet
) -> list[LocalParameter]:
    logical = f"model.layers.{layer}."
    tensors = shape.layer_tensors(layer)
    input_norm, mlp_norm = (prefix + name for name in _NORM_NAMES[names])
    attention, mlp = prefix + "self_attention.", prefix + "mlp."

    def own(name: str, tensor: str) -> LocalParameter:
        return whole(name, logical + tensor, tensors[logical + tensor])

    parameters = [own(input_norm, "input_layernorm.weight")]
    parameters.append(
        sharded(
            attention + "linear_proj.weight",
            logical + "self_attn.o_proj.weight",
            tensors[logical + "self_attn.o_proj.weight"],
            dim=1,
            index=tp_rank,
            count=tp_size,
        )
    )
    kinds = ("weight", "bias") if shape.qkv_bias else ("weight",)
    parameters += [
        _interleaved_qkv(shape, attention + f"linear_qkv.{kind}", layer, kind, tp_rank, tp_size)
        for kind in kinds
    ]
    if shape.qk_norm:
        parameters.append(own(attention + "q_layernorm.weight", "self_attn.q_norm.weight"))
        parameters.append(own(attention + "k_layernorm.weight", "self_attn.k_norm.weight"))
    parameters.append(own(mlp_norm, "post_attention_layernorm.weight"))
    rows = shape.ffn_hidden_size // tp_size
    share = (tp_rank * rows, (tp_rank + 1) * rows)
    parameters.append(
        row_stack(
            mlp + "linear_fc1.weight",
            [
                (logical + f"mlp.{half}_proj.weight", tensors[logical + f"mlp.{half}_proj.weight"], share)
                for half in ("gate", "up")
            ],
        )
    )
    down = logical + "mlp.down_proj.weight"
    parameters.append(
        sharded(mlp + "linear_fc2.weight", down, tensors[down], dim=1, index=tp_rank, count=tp_size)
    )
    return parameters


def _interleaved_qkv(
    shape: ModelShape, name: str, layer: int, kind: str, tp_rank: int, tp_size: int
) -> LocalParameter:
    """Megatron's fused QKV: the heads of each KV group together, groups in order."""
    tensors = shape.layer_tensors(layer)
    prefix = f"model.layers.{layer}.self_attn."
    heads_per_group = shape.num_heads // shape.num_kv_heads
    groups_per_rank = shape.num_kv_heads // tp_size
    parts = []
    for group in range(tp_rank * groups_per_rank, (tp_rank + 1) * groups_per_rank):
        for projection, heads in (("q", heads_per_group), ("k", 1), ("v", 1)):
            tensor = f"{prefix}{projection}_proj.{kind}"
            rows = heads * shape.head_dim
            parts.append((tensor, tensors[tensor], (group * rows, (group + 1) * rows)))
    return row_stack(name, parts)
