"""The layout of Megatron-core's GPTModel under (p, t, d), in both of its parameter naming schemes.

The family defines a layer's contents. `word_embeddings` and `output_layer` are equal shares of the vocabulary, padded
to a multiple of 64 and of t.
With tied embeddings and more than one pipeline stage, the last stage holds a copy of the embedding as `output_layer`.
"""

from __future__ import annotations

from functools import lru_cache

from hybridengine.errors import PlanError, raise_all
from hybridengine.families.family import NameSet
from hybridengine.families.registry import FAMILIES
from hybridengine.models.shapes import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    SCORE_HEAD,
    ModelShape,
    layer_prefix,
    padded_vocab_size,
)
from hybridengine.reshard.layout import Layout, LocalParameter, Shard, layer_parameters, vocab_shard, whole
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import MODEL_AXES, TrainSizes


@lru_cache(maxsize=16)
def megatron_layout(shape: ModelShape, grid: Grid, names: NameSet = NameSet.LOCAL) -> Layout:
    """Return the layout of a GPTModel over the ranks of `grid`; PlanError if t ranks cannot share the model."""
    raise_all(shape.tp_problems(grid.sizes.tp_size), PlanError)
    keys = {rank: place.along(MODEL_AXES) for rank, place in enumerate(grid.coordinates())}
    shards = {
        (pp_rank, tp_rank): megatron_shard(shape, grid.sizes, pp_rank, tp_rank, names)
        for pp_rank, tp_rank in sorted(set(keys.values()))
    }
    return Layout(shape, keys, shards, kind=f"megatron {grid.sizes}")


def megatron_shard(shape: ModelShape, sizes: TrainSizes, pp_rank: int, tp_rank: int, names: NameSet) -> Shard:
    """Return the parameters of the rank at (`pp_rank`, `tp_rank`); names begin with the virtual stage, if any."""
    pp_size, tp_size, num_chunks = sizes.pp_size, sizes.tp_size, sizes.virtual_stages
    first, last = ("0.", f"{num_chunks - 1}.") if num_chunks > 1 else ("", "")
    padded = padded_vocab_size(shape.vocab_size, tp_size)
    vocab_shape = shape.tensors[EMBEDDING]
    parameters: list[LocalParameter] = []
    if pp_rank == 0:
        parameters.append(
            vocab_shard(
                f"{first}embedding.word_embeddings.weight", EMBEDDING, vocab_shape, padded, tp_rank, tp_size
            )
        )
    entries = FAMILIES[shape.family].megatron_layer(shape, names)
    for chunk, block in enumerate(shape.split_layers(*sizes.blocks)[pp_rank::pp_size]):
        start = f"{chunk}." if num_chunks > 1 else ""
        for index, layer in enumerate(block):
            prefixes = f"{start}decoder.layers.{index}.", layer_prefix(layer)
            parameters += layer_parameters(entries, prefixes, shape.tensors, tp_rank, tp_size)
    if pp_rank == pp_size - 1:
        parameters.append(
            whole(f"{last}decoder.final_layernorm.weight", FINAL_NORM, shape.tensors[FINAL_NORM])
        )
        if shape.num_labels:
            parameters.append(whole(f"{last}output_layer.weight", SCORE_HEAD, shape.tensors[SCORE_HEAD]))
        elif not shape.tied_embeddings or pp_size > 1:
            head = EMBEDDING if shape.tied_embeddings else LM_HEAD
            parameters.append(
                vocab_shard(f"{last}output_layer.weight", head, vocab_shape, padded, tp_rank, tp_size)
            )
    return Shard(tuple(parameters))
