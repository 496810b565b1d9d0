"""The layout of Megatron-core's GPTModel under (p, t, d), in both of its parameter naming schemes.

The family defines a layer's contents. `word_embeddings` and `output_layer` are equal shares of the vocabulary, padded
to a multiple of 64 and of t.
With tied embeddings and more than one pipeline stage, the last stage holds a copy of the embedding as `output_layer`.
"""

from __future__ import annotations

from functools import lru_cache

from hybridengine.errors import PlanError, raise_all
from hybridengine.families.adapters import megatron_adapters
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
from hybridengine.reshard.layout import (
    Layout,
    LocalParameter,
    Shard,
    ShardKey,
    held_experts,
    layer_parameters,
    vocab_shard,
    whole,
)
from hybridengine.topology.experts import EXPERT_AXES, ExpertGrid
from hybridengine.topology.fitting import train_problems
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import MODEL_AXES, TrainSizes


@lru_cache(maxsize=16)
def megatron_layout(shape: ModelShape, grid: Grid, names: NameSet = NameSet.LOCAL) -> Layout:
    """Return the layout of a GPTModel over the ranks of `grid`; PlanError if t ranks cannot share the model."""
    sizes = grid.sizes
    raise_all(train_problems(shape, sizes), PlanError)
    keys: dict[int, ShardKey] = {
        rank: place.along(MODEL_AXES) for rank, place in enumerate(grid.coordinates())
    }
    if shape.experts:
        places = enumerate(ExpertGrid(grid).coordinates())
        keys = {rank: keys[rank] + place.along(EXPERT_AXES) for rank, place in places}
    shards = _shards(shape, sizes, tuple(sorted(set(keys.values()))), names)
    return Layout(shape, keys, shards, kind=f"megatron {sizes}")


@lru_cache(maxsize=16)
def _shards(
    shape: ModelShape, sizes: TrainSizes, keys: tuple[ShardKey, ...], names: NameSet
) -> dict[ShardKey, Shard]:
    """Return the shards of a layout, which are those of every order of its ranks."""
    return {key: megatron_shard(shape, sizes, key, names) for key in keys}


def megatron_shard(shape: ModelShape, sizes: TrainSizes, key: ShardKey, names: NameSet) -> Shard:
    """Return the parameters of the ranks with a key (pp, tp), or (pp, tp, ep, etp) of a mixture of experts.

    Names begin with the virtual stage, if there are any.
    """
    pp_rank, tp_rank, *_ = key
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
    family = FAMILIES[shape.family]
    for chunk, block in enumerate(shape.split_layers(*sizes.blocks)[pp_rank::pp_size]):
        start = f"{chunk}." if num_chunks > 1 else ""
        for index, layer in enumerate(block):
            prefixes = f"{start}decoder.layers.{index}.", layer_prefix(layer)
            entries = family.megatron_layer(shape, names, layer)
            entries += tuple(megatron_adapters(entries, shape.adapters))
            parameters += layer_parameters(entries, prefixes, shape.tensors, tp_rank, tp_size)
            if experts := shape.expert_layer(layer):
                ep_rank, etp_rank = key[2:]
                for place, number in enumerate(
                    held_experts(experts.num_experts, ep_rank, sizes.expert_parts)
                ):
                    own = family.megatron_expert(shape, names, number, place)
                    parameters += layer_parameters(
                        (*own, *megatron_adapters(own, shape.adapters)),
                        prefixes,
                        shape.tensors,
                        etp_rank,
                        sizes.expert_shards,
                    )
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
