"""Shards of a model in plain numpy, written without layouts, pieces or grids: the reference for tests of layouts.

Every element of a logical tensor is a number of its own, from 1; 0 is padding. Two arrays are equal only if they hold
the same elements of the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from hybridengine.families.sizes import ExpertSizes, LatentSizes
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.layout import Shard

Arrays = dict[str, np.ndarray]

HF_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
MEGATRON_NORMS = {
    "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    "transformer_engine": (
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
    ),
}
GATED = ("gate", "up", "down")
PRE_MLP_NORM = "pre_mlp_layernorm.weight"
EXPERTS = {
    "qwen3_moe": ("mlp.", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.", ("w1", "w3", "w2")),
    "deepseek_v3": ("mlp.", ("gate_proj", "up_proj", "down_proj")),
}
"""Mixture of experts -> prefix of its router and experts, and names of gate, up and down."""
QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text")
POST_NORMS = {
    "gemma3_text": ("pre_feedforward", "post_attention", "post_feedforward"),
    "glm4": ("post_attention", "post_self_attn", "post_mlp"),
}
"""Families with norms of outputs -> names of the norm before the MLP, and of those of attention and of the MLP."""
FUSED_MLP = ("phi3", "glm4")
"""Families that store gate and up in one tensor."""
BIASED = ("qwen2", "qwen2_5_vl", "glm4")
"""Families whose q, k and v have a bias here."""
LATENT = LatentSizes(query_rank=3, key_value_rank=512, plain_head_dim=2, rotary_head_dim=64, value_head_dim=3)
"""Sizes of latent attention, of which vLLM fixes two."""
LATENT_NORMS = {
    "local": ("q_layernorm.weight", "kv_layernorm.weight"),
    "transformer_engine": ("linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight"),
}


def small_shape(
    family: str = "llama",
    *,
    tied: bool = False,
    vocab: int = 131,
    layers: int = 5,
    kv_heads: int = 4,
    heads_per_group: int = 2,
    num_labels: int = 0,
) -> ModelShape:
    """Return a small model: two query heads of 2 per KV head, 3 MLP rows for two query heads, hidden size 6.

    A mixture has four experts, each as large as the MLP; DeepSeek-V3 also a shared one, and an MLP in its first layer.
    Qwen2 and Qwen2.5-VL have no head_dim of their own, so their hidden size is that of all query heads.
    """
    ffn = 3 * heads_per_group * kv_heads // 2
    latent = LATENT if family == "deepseek_v3" else None
    rest = 1 if latent else 0
    return ModelShape(
        family=family,
        num_layers=layers,
        hidden_size=2 * heads_per_group * kv_heads if family in ("qwen2", "qwen2_5_vl") else 6,
        ffn_hidden_size=ffn,
        experts=ExpertSizes(4, 2, ffn, num_dense_layers=rest, num_shared=rest) if family in EXPERTS else None,
        latent=latent,
        num_heads=heads_per_group * kv_heads,
        num_kv_heads=heads_per_group * kv_heads if latent else kv_heads,
        head_dim=latent.head_dim if latent else 2,
        vocab_size=vocab,
        max_positions=64,
        tied_embeddings=tied,
        num_labels=num_labels,
        qkv_bias=True if family == "glm4" else None,
    )


@lru_cache(maxsize=64)
def numbered(shape: ModelShape) -> Arrays:
    """Return all logical tensors, with their elements numbered from 1 without gaps."""
    tensors, first = {}, 1
    for name, size in shape.tensors.items():
        count = int(np.prod(size))
        tensors[name] = np.arange(first, first + count).reshape(size)
        first += count
    return tensors


def cut_shard(shard: Shard, tensors: Arrays) -> Arrays:
    """Return local parameters as the pieces of a shard describe them.

    Raises:
        AssertionError: two pieces claim one element, or a piece leaves its parameter or its tensor.
    """
    found = {}
    for parameter in shard.parameters:
        values = np.zeros(parameter.shape, dtype=np.int64)
        for piece in parameter.pieces:
            box = tensors[piece.tensor][tuple(slice(a, b) for a, b in piece.box)]
            spans = zip(piece.offset, piece.box, strict=True)
            inside = tuple(slice(o, o + b - a) for o, (a, b) in spans)
            assert box.shape == tuple(b - a for a, b in piece.box), f"{piece} leaves its tensor"
            assert values[inside].shape == box.shape, f"{piece} leaves {parameter.name}"
            assert not values[inside].any(), f"{piece} overlaps another piece of {parameter.name}"
            values[inside] = box
        assert parameter.name not in found, f"{parameter.name} exists twice"
        found[parameter.name] = values
    return found


def pad_rows(matrix: np.ndarray, *divisors: int) -> np.ndarray:
    """Return `matrix` with zero rows appended, up to the first row count that all `divisors` divide."""
    rows = len(matrix)
    while any(rows % divisor for divisor in divisors):
        rows += 1
    return np.concatenate([matrix, np.zeros((rows - len(matrix), matrix.shape[1]), matrix.dtype)])


def is_replicated(name: str) -> bool:
    """True for what is whole on every tensor rank: norms, routers of experts, and projections to latent vectors."""
    return "norm" in name or name.endswith((".gate.weight", "_bias", "_a_proj.weight", "_with_mqa.weight"))


def stages_of(num_layers: int, pp_size: int) -> list[list[int]]:
    """Return the layers of each training stage; numpy gives the first parts the longer shares."""
    return [part.tolist() for part in np.array_split(np.arange(num_layers), pp_size)]


def attention_rows(shape: ModelShape, tensors: Arrays, prefix: str, kind: str = "weight") -> list[np.ndarray]:
    """Return [q, k, v] of a layer, which Phi-3 stores in one tensor."""
    if shape.family == "phi3":
        return np.split(
            tensors[f"{prefix}self_attn.qkv_proj.{kind}"], [shape.q_size, shape.q_size + shape.kv_size]
        )
    return [tensors[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv"]


def mlp_rows(shape: ModelShape, tensors: Arrays, prefix: str) -> list[np.ndarray]:
    """Return [gate, up] of a layer, which Phi-3 and GLM-4 store in one tensor."""
    if shape.family in FUSED_MLP:
        return np.split(tensors[f"{prefix}mlp.gate_up_proj.weight"], 2)
    return [tensors[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")]


def expert_matrices(shape: ModelShape, tensors: Arrays, prefix: str, number: int) -> list[np.ndarray]:
    """Return [gate, up, down] of an expert of a layer."""
    block, names = EXPERTS[shape.family]
    return [tensors[f"{prefix}{block}experts.{number}.{name}.weight"] for name in names]


def megatron_qkv(shape: ModelShape, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return Megatron's whole fused QKV: (groups, heads of a group and k and v, head_dim, ...) flattened to rows."""
    groups = shape.num_kv_heads
    split = [part.reshape(groups, -1, shape.head_dim, *part.shape[1:]) for part in (q, k, v)]
    return np.concatenate(split, axis=1).reshape(-1, *q.shape[1:])


def megatron_reference(
    shape: ModelShape,
    tensors: Arrays,
    pp: int,
    p: int,
    tp: int,
    t: int,
    names: str = "local",
    expert: tuple[int, int, int, int] | None = None,
) -> Arrays:
    """Return the parameters of Megatron's rank at (pp, tp) under (p, t); `expert` is (ep, e, etp rank, etp), by default
    (0, 1, tp, t)."""
    ep, e, etp_rank, etp = expert or (0, 1, tp, t)

    def part(whole: np.ndarray, axis: int) -> np.ndarray:
        return np.split(whole, t, axis)[tp]

    local: Arrays = {}
    if pp == 0:
        local["embedding.word_embeddings.weight"] = part(
            pad_rows(tensors["model.embed_tokens.weight"], 64, t), 0
        )
    for index, layer in enumerate(stages_of(shape.num_layers, p)[pp]):
        old, new = f"model.layers.{layer}.", f"decoder.layers.{index}."
        input_norm, mlp_norm = MEGATRON_NORMS[names]
        has_experts = shape.expert_layer(layer) is not None
        if shape.latent:
            input_norm = HF_NORMS[0]
            q_norm, kv_norm = LATENT_NORMS[names]
            for mine, its, axis in (
                ("linear_q_down_proj.weight", "q_a_proj", None),
                (q_norm, "q_a_layernorm", None),
                ("linear_q_up_proj.weight", "q_b_proj", 0),
                ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa", None),
                (kv_norm, "kv_a_layernorm", None),
                ("linear_kv_up_proj.weight", "kv_b_proj", 0),
            ):
                values = tensors[f"{old}self_attn.{its}.weight"]
                local[f"{new}self_attention.{mine}"] = values if axis is None else part(values, axis)
        local[new + input_norm] = tensors[old + HF_NORMS[0]]
        pre_mlp = new + (PRE_MLP_NORM if has_experts else mlp_norm)
        local[pre_mlp] = tensors[old + HF_NORMS[1]]
        if shape.family in POST_NORMS:
            before, *behind = POST_NORMS[shape.family]
            local[pre_mlp] = tensors[f"{old}{before}_layernorm.weight"]
            for linear, norm in zip(("self_attention.linear_proj", "mlp.linear_fc2"), behind, strict=True):
                local[f"{new}{linear}.post_layernorm.weight"] = tensors[f"{old}{norm}_layernorm.weight"]
        kinds = () if shape.latent else ("weight", "bias") if shape.family in BIASED else ("weight",)
        for kind in kinds:
            fused = megatron_qkv(shape, *attention_rows(shape, tensors, old, kind))
            local[f"{new}self_attention.linear_qkv.{kind}"] = part(fused, 0)
        if shape.family in QK_NORM:
            for x in "qk":
                local[f"{new}self_attention.{x}_layernorm.weight"] = tensors[
                    f"{old}self_attn.{x}_norm.weight"
                ]
        local[new + "self_attention.linear_proj.weight"] = part(tensors[old + "self_attn.o_proj.weight"], 1)
        if shape.latent and has_experts:
            local[new + "mlp.router.expert_bias"] = tensors[old + "mlp.gate.e_score_correction_bias"]
            gate, up, down = (tensors[f"{old}mlp.shared_experts.{x}_proj.weight"] for x in GATED)
            local[new + "mlp.shared_experts.linear_fc1.weight"] = np.concatenate([part(gate, 0), part(up, 0)])
            local[new + "mlp.shared_experts.linear_fc2.weight"] = part(down, 1)
        if has_experts:
            local[new + "mlp.router.weight"] = tensors[f"{old}{EXPERTS[shape.family][0]}gate.weight"]
            for place in range(4 // e):
                gate, up, down = expert_matrices(shape, tensors, old, ep * (4 // e) + place)
                both = [np.split(rows, etp)[etp_rank] for rows in (gate, up)]
                for linear, values in (
                    ("linear_fc1", np.concatenate(both)),
                    ("linear_fc2", np.split(down, etp, 1)[etp_rank]),
                ):
                    name = (
                        f"local_experts.{place}.{linear}.weight"
                        if names == "local"
                        else f"{linear}.weight{place}"
                    )
                    local[f"{new}mlp.experts.{name}"] = values
            continue
        gate, up = (part(rows, 0) for rows in mlp_rows(shape, tensors, old))
        local[new + "mlp.linear_fc1.weight"] = np.concatenate([gate, up])
        local[new + "mlp.linear_fc2.weight"] = part(tensors[old + "mlp.down_proj.weight"], 1)
    if pp == p - 1:
        local["decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
        if shape.num_labels:
            local["output_layer.weight"] = tensors["score.weight"]
        elif not shape.tied_embeddings or p > 1:
            head = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
            local["output_layer.weight"] = part(pad_rows(tensors[head], 64, t), 0)
    return local


def vllm_reference(
    shape: ModelShape,
    tensors: Arrays,
    gen_pp: int,
    p: int,
    p_g: int,
    gen_tp: int,
    t_g: int,
    whole: bool = False,
) -> Arrays:
    """Return the parameters of the engine rank at (gen_pp, gen_tp), which joins p/p_g training stages if p_g | p.

    Tensor ranks have `whole` experts, or a part of each; both are slices of vLLM's parameters.
    """

    def kv_part(whole: np.ndarray) -> np.ndarray:
        heads = whole.reshape(shape.num_kv_heads, -1, *whole.shape[1:])
        copied = np.repeat(heads, max(1, t_g // shape.num_kv_heads), axis=0)
        return np.concatenate(np.split(copied, t_g)[gen_tp])

    def part(whole: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.split(whole, t_g, axis)[gen_tp]

    joined = p // p_g
    if p % p_g:
        layers = stages_of(shape.num_layers, p_g)[gen_pp]
    else:
        stages = stages_of(shape.num_layers, p)[gen_pp * joined : (gen_pp + 1) * joined]
        layers = [layer for stage in stages for layer in stage]
    first, last = gen_pp == 0, gen_pp == p_g - 1
    local: Arrays = {}
    if first or (last and shape.tied_embeddings):
        local["model.embed_tokens.weight"] = part(pad_rows(tensors["model.embed_tokens.weight"], 64))
    for layer in layers:
        prefix = f"model.layers.{layer}."
        if shape.latent:
            start = prefix + "self_attn."
            down = [tensors[f"{start}{x}.weight"] for x in ("q_a_proj", "kv_a_proj_with_mqa")]
            local[start + "fused_qkv_a_proj.weight"] = np.concatenate(down)
            for x in ("q_a_layernorm", "kv_a_layernorm"):
                local[f"{start}{x}.weight"] = tensors[f"{start}{x}.weight"]
            for x in ("q_b_proj", "kv_b_proj"):
                local[f"{start}{x}.weight"] = part(tensors[f"{start}{x}.weight"])
        kinds = () if shape.latent else ("weight", "bias") if shape.family in BIASED else ("weight",)
        for kind in kinds:
            q, k, v = attention_rows(shape, tensors, prefix, kind)
            local[f"{prefix}self_attn.qkv_proj.{kind}"] = np.concatenate([part(q), kv_part(k), kv_part(v)])
        if shape.family in QK_NORM:
            for x in "qk":
                local[f"{prefix}self_attn.{x}_norm.weight"] = tensors[f"{prefix}self_attn.{x}_norm.weight"]
        local[prefix + "self_attn.o_proj.weight"] = part(tensors[prefix + "self_attn.o_proj.weight"], 1)
        added = {f"{norm}_layernorm.weight" for norm in POST_NORMS.get(shape.family, ())}
        for norm in {*HF_NORMS, *added}:
            local[prefix + norm] = tensors[prefix + norm]
        if shape.latent and shape.expert_layer(layer):
            bias, shared = prefix + "mlp.gate.e_score_correction_bias", prefix + "mlp.shared_experts."
            local[bias] = tensors[bias]
            gate, up, down = (tensors[f"{shared}{x}_proj.weight"] for x in GATED)
            local[shared + "gate_up_proj.weight"] = np.concatenate([part(gate), part(up)])
            local[shared + "down_proj.weight"] = part(down, 1)
        if shape.expert_layer(layer):
            block = prefix + EXPERTS[shape.family][0]
            local[block + "gate.weight"] = tensors[block + "gate.weight"]
            own = range(gen_tp * 4 // t_g, (gen_tp + 1) * 4 // t_g) if whole else range(4)
            for place, number in enumerate(own):
                gate, up, down = expert_matrices(shape, tensors, prefix, number)
                if not whole:
                    gate, up, down = part(gate), part(up), part(down, 1)
                local[f"{block}experts.routed_experts.w13_weight[{place}]"] = np.concatenate([gate, up])
                local[f"{block}experts.routed_experts.w2_weight[{place}]"] = down
            continue
        halves = [part(rows) for rows in mlp_rows(shape, tensors, prefix)]
        local[prefix + "mlp.gate_up_proj.weight"] = np.concatenate(halves)
        local[prefix + "mlp.down_proj.weight"] = part(tensors[prefix + "mlp.down_proj.weight"], 1)
    if last:
        local["model.norm.weight"] = tensors["model.norm.weight"]
        if not shape.tied_embeddings:
            local["lm_head.weight"] = part(pad_rows(tensors["lm_head.weight"], 64))
    return local


def assert_same(found: Arrays, expected: Arrays, where: str) -> None:
    """Assert that names, shapes and elements are equal."""
    assert sorted(found) == sorted(expected), where
    for name, values in expected.items():
        assert found[name].shape == values.shape, f"{where} {name}"
        assert np.array_equal(found[name], values), f"{where} {name}"


def holders(
    locals_of: dict[int, Arrays], num_elements: int, keep: Callable[[str], bool] = bool
) -> np.ndarray:
    """Return how often each element, by its number minus 1, is held in all parameters whose name `keep` accepts."""
    count = np.zeros(num_elements + 1, dtype=np.int64)
    for local in locals_of.values():
        for name, values in local.items():
            if keep(name):
                count += np.bincount(values.ravel(), minlength=num_elements + 1)
    return count[1:]
