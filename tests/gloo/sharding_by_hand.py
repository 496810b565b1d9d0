"""Elements that a rank holds in training and in generation, from first principles: without layouts, plans or grids.

Shapes: every mask has the shape of its logical tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridengine.models.shapes import ModelShape

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Projections that are sharded by rows, as are their biases."""
COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Part:
    """A rank's part of the model: some layers, and one of `tp_size` shards of each."""

    layers: frozenset[int]
    first: bool
    """True if the part has the embedding."""
    last: bool
    """True if the part has the final norm and the head."""
    tp_rank: int
    tp_size: int


def train_place(rank: int, p: int, t: int, d: int, order: str, c: int = 1) -> tuple[int, int, int]:
    """Return (pp, replica, tp) of a rank; context-parallel ranks are replicas next to each other."""
    tp_rank, cp_rank, rest = rank % t, rank // t % c, rank // (t * c)
    pp_rank, dp_rank = (rest % p, rest // p) if order == "PAPER" else (rest // d, rest % d)
    return pp_rank, dp_rank * c + cp_rank, tp_rank


def stage_of_layers(num_layers: int, p: int) -> list[int]:
    """Return the stage of each layer: equal runs, the first `num_layers % p` stages one longer."""
    return [int(stage) for stage, run in enumerate(np.array_split(np.arange(num_layers), p)) for _ in run]


def train_part(shape: ModelShape, pp_rank: int, tp_rank: int, p: int, t: int, v: int = 1) -> Part:
    blocks = stage_of_layers(shape.num_layers, p * v)
    layers = frozenset(layer for layer, block in enumerate(blocks) if block % p == pp_rank)
    return Part(layers, pp_rank == 0, pp_rank == p - 1, tp_rank, t)


def gen_place(
    rank: int, p: int, t: int, d: int, order: str, p_gen: int, t_gen: int, vanilla: bool = False, c: int = 1
) -> tuple[int, int]:
    """Return (gen pp, gen tp) of a rank.

    Interval grouping if p_gen | p and one of t and t_gen divides the other; else engines are consecutive ranks of the
    paper's order. Where t_gen is the larger, the ranks with one training shard take its parts in turn.
    """
    pp_rank, dp_rank, tp_rank = train_place(rank, p, t, d, order, c)
    if vanilla or p % p_gen or (t % t_gen and t_gen % t):
        position = (dp_rank * p + pp_rank) * t + tp_rank
        return position // t_gen % p_gen, position % t_gen
    stages = p // p_gen
    if t % t_gen == 0:
        return pp_rank // stages, tp_rank * t_gen // t
    parts = t_gen // t
    return pp_rank // stages, tp_rank * parts + (dp_rank * stages + pp_rank % stages) % parts


def gen_part(shape: ModelShape, gen_pp_rank: int, gen_tp_rank: int, p: int, p_gen: int, t_gen: int) -> Part:
    """Return an engine rank's part: p / p_gen training stages, or equal runs of layers if p_gen does not divide p."""
    stages = stage_of_layers(shape.num_layers, p_gen if p % p_gen else p)
    of_stage = [stage if p % p_gen else stage * p_gen // p for stage in stages]
    layers = frozenset(layer for layer, stage in enumerate(of_stage) if stage == gen_pp_rank)
    return Part(layers, gen_pp_rank == 0, gen_pp_rank == p_gen - 1, gen_tp_rank, t_gen)


def padded_vocab(shape: ModelShape) -> int:
    return -(-shape.vocab_size // 64) * 64


def largest_bucket(shape: ModelShape) -> int:
    """Return a bucket size for the largest fused parameter of an unsharded model, which makes several buckets."""
    return (
        2
        * shape.hidden_size
        * max(padded_vocab(shape), shape.q_size + 2 * shape.kv_size, 2 * shape.ffn_hidden_size)
    )


def row_share(shape: ModelShape, projection: str, part: Part) -> tuple[int, int]:
    """Return (number of shares, the part's index) of a projection's rows: ranks that share a KV head are consecutive."""
    if projection in ("k_proj", "v_proj") and part.tp_size > shape.num_kv_heads:
        return shape.num_kv_heads, part.tp_rank // (part.tp_size // shape.num_kv_heads)
    return part.tp_size, part.tp_rank


def mask(shape: ModelShape, tensor: str, part: Part) -> np.ndarray:
    """Return a mask that is True where `part` holds the element of a logical tensor."""
    held = np.zeros(shape.tensors[tensor], dtype=bool)
    if tensor in ("model.embed_tokens.weight", "lm_head.weight"):
        tied_head = part.last and shape.tied_embeddings
        if part.last if tensor == "lm_head.weight" else part.first or tied_head:
            share = padded_vocab(shape) // part.tp_size
            held[part.tp_rank * share : (part.tp_rank + 1) * share] = True
        return held
    if tensor == "model.norm.weight":
        held[:] = part.last
        return held
    if int(tensor.split(".")[2]) not in part.layers:
        return held
    projection = tensor.split(".")[-2]
    if projection in ROWS:
        count, index = row_share(shape, projection, part)
        share = held.shape[0] // count
        held[index * share : (index + 1) * share] = True
    elif projection in COLUMNS:
        share = held.shape[1] // part.tp_size
        held[:, part.tp_rank * share : (part.tp_rank + 1) * share] = True
    else:
        held[:] = True
    return held


def num_missing(shape: ModelShape, has: Part, needs: Part) -> int:
    """Return the number of elements that `needs` holds and `has` does not."""
    return sum(int((mask(shape, name, needs) & ~mask(shape, name, has)).sum()) for name in shape.tensors)


def num_stored(shape: ModelShape, part: Part) -> int:
    """Return the number of elements of all parameters of `part`, including vocabulary padding.

    A last stage has a copy of a tied embedding, unless it is the first stage as well and has the embedding itself.
    """
    own = sum(int(mask(shape, name, part).sum()) for name in shape.tensors)
    num_vocab_parameters = int(part.first) + int(part.last)
    if shape.tied_embeddings:
        num_vocab_parameters = min(num_vocab_parameters, 1)
    share = padded_vocab(shape) // part.tp_size
    real = min(max(shape.vocab_size - part.tp_rank * share, 0), share)
    return own + num_vocab_parameters * (share - real) * shape.hidden_size


def generation_weights(shape: ModelShape, tensors: dict[str, Tensor], part: Part) -> dict[str, Tensor]:
    """Return vLLM's parameters of `part`, cut out of the unsharded tensors."""

    def rows(name: str) -> Tensor:
        count, index = row_share(shape, name.split(".")[-2], part)
        return tensors[name].chunk(count, dim=0)[index]

    def columns(name: str) -> Tensor:
        return tensors[name].chunk(part.tp_size, dim=1)[part.tp_rank]

    def vocab(name: str) -> Tensor:
        whole = tensors[name]
        padding = whole.new_zeros(padded_vocab(shape) - whole.size(0), whole.size(1))
        return torch.cat([whole, padding]).chunk(part.tp_size, dim=0)[part.tp_rank]

    found: dict[str, Tensor] = {}
    if part.first or (part.last and shape.tied_embeddings):
        found["model.embed_tokens.weight"] = vocab("model.embed_tokens.weight")
    for layer in part.layers:
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        for kind in ("weight", "bias") if f"{attention}q_proj.bias" in tensors else ("weight",):
            found[f"{attention}qkv_proj.{kind}"] = torch.cat(
                [rows(f"{attention}{x}_proj.{kind}") for x in "qkv"]
            )
        found[mlp + "gate_up_proj.weight"] = torch.cat(
            [rows(f"{mlp}{x}_proj.weight") for x in ("gate", "up")]
        )
        found[attention + "o_proj.weight"] = columns(attention + "o_proj.weight")
        found[mlp + "down_proj.weight"] = columns(mlp + "down_proj.weight")
        norms = [prefix + "input_layernorm.weight", prefix + "post_attention_layernorm.weight"]
        norms += (
            [f"{attention}{x}_norm.weight" for x in "qk"] if f"{attention}q_norm.weight" in tensors else []
        )
        found |= {name: tensors[name] for name in norms}
    if part.last:
        found["model.norm.weight"] = tensors["model.norm.weight"]
        if not shape.tied_embeddings:
            found["lm_head.weight"] = vocab("lm_head.weight")
    return found
