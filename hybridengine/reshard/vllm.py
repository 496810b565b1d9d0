"""The layout of vLLM's dense decoders under (p_g, t_g), over a generation grid.

The family defines a layer's contents. `embed_tokens` and `lm_head` are equal shares of the vocabulary, padded to a
multiple of 64. If t_g exceeds the number of KV heads, t_g / num_kv_heads consecutive ranks hold the same k and v head.
With tied embeddings, the head is the embedding, so the last stage has `embed_tokens` as well.
"""

from __future__ import annotations

from functools import lru_cache

from hybridengine.errors import PlanError, raise_all
from hybridengine.families.adapters import vllm_adapters
from hybridengine.families.family import NameSet
from hybridengine.families.registry import FAMILIES
from hybridengine.models.shapes import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
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
from hybridengine.topology.fitting import gen_problems
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import MODEL_AXES, GenSizes, TrainSizes


@lru_cache(maxsize=16)
def vllm_layout(shape: ModelShape, generation: GenerationGrid, adapted: bool = True) -> Layout:
    """Return the layout of the engines; PlanError if they cannot hold the model, or vocabulary shards do not nest.

    Unless `adapted`, engines load the model's adapters from files, and the layout has the base alone.
    """
    sizes, train = generation.sizes, generation.train.sizes
    raise_all(gen_problems(shape, sizes, train.tp_size), PlanError)
    stages = shape.gen_stage_layers(train.pp_size, sizes.pp_size)
    keys = {rank: place.along(MODEL_AXES) for rank, place in enumerate(generation.coordinates())}
    return Layout(shape, keys, _shards(shape, tuple(stages), sizes, adapted), kind=f"vllm {sizes}")


@lru_cache(maxsize=16)
def _shards(
    shape: ModelShape, stages: tuple[range, ...], sizes: GenSizes, adapted: bool
) -> dict[ShardKey, Shard]:
    """Return the shards of an engine, in whatever order of ranks."""
    return {
        (pp_rank, tp_rank): vllm_shard(shape, stages, pp_rank, tp_rank, sizes, adapted)
        for pp_rank in range(sizes.pp_size)
        for tp_rank in range(sizes.tp_size)
    }


@lru_cache(maxsize=16)
def engines_layout(
    shape: ModelShape, sizes: GenSizes, num_engines: int, first_rank: int, adapted: bool = True
) -> Layout:
    """Return the layout of engines on consecutive ranks of their own from `first_rank`; PlanError as `vllm_layout`."""
    grid = Grid(TrainSizes(sizes.pp_size, sizes.tp_size, num_engines))
    own = vllm_layout(shape, GenerationGrid(grid, sizes), adapted)
    keys = {first_rank + rank: key for rank, key in own.keys.items()}
    return Layout(shape, keys, own.shards, kind=f"{num_engines} x {own.kind}")


def vllm_shard(
    shape: ModelShape,
    stages: tuple[range, ...],
    pp_rank: int,
    tp_rank: int,
    sizes: GenSizes,
    adapted: bool = True,
) -> Shard:
    """Return the parameters of the engine rank at (`pp_rank`, `tp_rank`); an expert's are slices of vLLM's."""
    tp_size, family = sizes.tp_size, FAMILIES[shape.family]
    first, last = pp_rank == 0, pp_rank == len(stages) - 1
    padded = padded_vocab_size(shape.vocab_size, 1)
    vocab_shape = shape.tensors[EMBEDDING]
    parameters: list[LocalParameter] = []
    if first or (last and shape.tied_embeddings):
        parameters.append(vocab_shard(EMBEDDING, EMBEDDING, vocab_shape, padded, tp_rank, tp_size))
    for layer in stages[pp_rank]:
        prefixes = layer_prefix(layer), layer_prefix(layer)
        entries = family.vllm_layer(shape, layer)
        if adapted and not shape.merges_adapters:
            trained = family.megatron_layer(shape, NameSet.LOCAL, layer)
            entries += tuple(vllm_adapters(entries, trained, shape.adapters, whole_slots=family.whole_slots))
        parameters += layer_parameters(entries, prefixes, shape.tensors, tp_rank, tp_size)
        if experts := shape.expert_layer(layer):
            # vLLM's e_g parts are its tensor ranks.
            part, shard = (tp_rank, 0) if sizes.expert_parts > 1 else (0, tp_rank)
            for place, number in enumerate(held_experts(experts.num_experts, part, sizes.expert_parts)):
                parameters += layer_parameters(
                    family.vllm_expert(shape, number, place),
                    prefixes,
                    shape.tensors,
                    shard,
                    sizes.expert_shards,
                )
    if last:
        parameters.append(whole(FINAL_NORM, FINAL_NORM, shape.tensors[FINAL_NORM]))
        if not shape.tied_embeddings:
            parameters.append(vocab_shard(LM_HEAD, LM_HEAD, vocab_shape, padded, tp_rank, tp_size))
    return Shard(tuple(parameters))
