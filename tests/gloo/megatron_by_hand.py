"""Megatron's parameters from first principles: their logical tensors, and the whole model from its shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.backends.megatron.trainer import MegatronModel
from hybridengine.models.shapes import ModelShape
from tests.gloo.sharding_by_hand import Part, mask, padded_vocab, stage_of_layers

Shards = dict[tuple[int, int], dict[str, Tensor]]
"""(pp rank, tp rank) -> parameters of that rank."""

OF_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
"""Parameter of a Megatron layer -> tensors of the Hugging Face layer that it contains."""


def stored_tensors(shape: ModelShape, part: Part) -> list[tuple[str, ...]]:
    """Return, for each parameter that a rank stores in training, the tensors that it holds parts of."""
    embedding = "model.embed_tokens.weight"
    found: list[tuple[str, ...]] = [(embedding,)] if part.first else []
    for layer in part.layers:
        for names in OF_LAYER.values():
            held = tuple(f"model.layers.{layer}.{name}" for name in names)
            found += [held] if held[0] in shape.tensors else []
    if part.last:
        found.append(("model.norm.weight",))
        if not shape.tied_embeddings:
            found.append(("lm_head.weight",))
        elif not part.first:
            found.append((embedding,))
    return found


def num_retained(shape: ModelShape, train: Part, gen: Part) -> int:
    """Return the elements of training parameters of which `gen` lacks a part: the way back could not restore them."""
    total = 0
    for tensors in stored_tensors(shape, train):
        held = {tensor: mask(shape, tensor, train) for tensor in tensors}
        if not any((held[tensor] & ~mask(shape, tensor, gen)).any() for tensor in tensors):
            continue
        if tensors[0] in ("model.embed_tokens.weight", "lm_head.weight"):
            total += padded_vocab(shape) // train.tp_size * shape.hidden_size
        else:
            total += sum(int(part.sum()) for part in held.values())
    return total


def unsharded(shape: ModelShape, shards: Shards, p: int, t: int) -> dict[str, Tensor]:
    """Return the Hugging Face tensors of a model that is trained under (p, t)."""

    def join(pp_rank: int, name: str, dim: int) -> Tensor:
        return torch.cat([shards[pp_rank, tp_rank][name] for tp_rank in range(t)], dim=dim)

    def vocabulary(pp_rank: int, name: str) -> Tensor:
        return join(pp_rank, name, 0)[: shape.vocab_size]

    def alike(pp_rank: int, name: str) -> Tensor:
        first = shards[pp_rank, 0][name]
        assert all(torch.equal(shards[pp_rank, tp_rank][name], first) for tp_rank in range(t)), name
        return first

    stages = stage_of_layers(shape.num_layers, p)
    tensors = {"model.embed_tokens.weight": vocabulary(0, "embedding.word_embeddings.weight")}
    for layer, stage in enumerate(stages):
        prefix = f"decoder.layers.{layer - stages.index(stage)}."
        for name, held in OF_LAYER.items():
            own = prefix + name
            if own not in shards[stage, 0]:
                continue
            if "linear_qkv" in name:
                parts = _split_heads(shape, join(stage, own, 0))
            elif "linear_fc1" in name:
                halves = [shards[stage, tp_rank][own].chunk(2) for tp_rank in range(t)]
                parts = [torch.cat([pair[half] for pair in halves]) for half in (0, 1)]
            elif "linear_" in name:
                parts = [join(stage, own, 1)]
            else:
                parts = [alike(stage, own)]
            tensors |= {f"model.layers.{layer}.{x}": part for x, part in zip(held, parts, strict=True)}
    tensors["model.norm.weight"] = alike(p - 1, "decoder.final_layernorm.weight")
    if not shape.tied_embeddings:
        tensors["lm_head.weight"] = vocabulary(p - 1, "output_layer.weight")
    elif p > 1:
        copy = vocabulary(p - 1, "output_layer.weight")
        assert torch.equal(copy, tensors["model.embed_tokens.weight"])
    return tensors


def _split_heads(shape: ModelShape, fused: Tensor) -> list[Tensor]:
    """Return [q, k, v] of Megatron's fused rows: for each KV head its query heads, its key head, its value head."""
    queries = shape.num_heads // shape.num_kv_heads
    groups = fused.view(shape.num_kv_heads, queries + 2, shape.head_dim, *fused.shape[1:])
    return [
        groups[:, first:last].reshape(-1, *fused.shape[1:])
        for first, last in ((0, queries), (queries, queries + 1), (queries + 1, queries + 2))
    ]


def gather_unsharded(model: MegatronModel, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Return the whole model, gathered from all training ranks; checks that replicas are equal.

    Args:
        group: the training ranks; None means the world. The call is collective over it.
    """
    place, sizes = model.grid.coordinate(model.rank), model.grid.sizes
    own = {name: model.weights[name].clone() for name in model.weights.names}
    found: list[tuple[tuple[int, int], dict[str, Tensor]] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, ((place.pp_rank, place.tp_rank), own), group=group)
    shards: Shards = {}
    for answer in found:
        assert answer is not None
        key, parameters = answer
        first = shards.setdefault(key, parameters)
        assert all(torch.equal(parameters[name], first[name]) for name in first), f"replicas of {key} differ"
    p, v = sizes.pp_size, sizes.virtual_stages
    blocks: Shards = {}
    for (pp_rank, tp_rank), parameters in shards.items():
        for name, parameter in parameters.items():
            chunk, _, rest = name.partition(".") if v > 1 else ("0", "", name)
            blocks.setdefault((int(chunk) * p + pp_rank, tp_rank), {})[rest] = parameter
    return unsharded(model.shape, blocks, p * v, sizes.tp_size)
