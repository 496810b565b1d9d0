"""DeepSeek-V3: multi-head latent attention, and experts beside a shared one in all but the first layers.

A router adds a bias to each expert's score where it chooses experts, and not where it weights them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridengine.families.experts import MixtureFamily
from hybridengine.families.family import Columns, Entry, NameSet, Rows, Stack, Whole, gated_mlp, same
from hybridengine.families.sizes import DecoderSizes, ExpertSizes, LatentSizes

_BIAS, _SHARED = "mlp.gate.e_score_correction_bias", "mlp.shared_experts."
_LATENT_NORMS = {
    NameSet.LOCAL: ("q_layernorm.weight", "kv_layernorm.weight"),
    NameSet.TRANSFORMER_ENGINE: ("linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight"),
}
_ENGINE_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""Sizes for which vLLM has kernels of latent attention."""
_FIXED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "rope_interleave": True,
    "moe_layer_freq": 1,
}
"""Keys with only one supported value. vLLM takes the first two for others where they are absent."""


class DeepseekV3(MixtureFamily):
    """DeepSeek-V3, without its layers that predict further tokens (MTP)."""

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        config = super().completed(config)
        return {"head_dim": config["qk_rope_head_dim"], **config}

    def refusals(self, config: Mapping[str, Any]) -> Iterator[str]:
        yield from super().refusals(config)
        for key, value in _FIXED.items():
            if config.get(key) != value:
                yield (
                    f"{key}={config.get(key)!r} is not supported; it must be {value!r}: restore the model's original"
                    " config.json"
                )
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        if kv_heads not in (None, heads):
            yield (
                f"num_key_value_heads={kv_heads} must be num_attention_heads={heads} with latent attention; restore the"
                " model's original config.json"
            )
        if config.get("tie_word_embeddings") and self.architectures[0] in config["architectures"]:
            yield "tie_word_embeddings=true is not supported by vLLM; use a model with a head of its own"
        if config["head_dim"] != (dim := config["qk_rope_head_dim"]):
            yield f"head_dim={config['head_dim']} must be qk_rope_head_dim={dim}, as transformers uses it; remove it"
        dense = config["first_k_dense_replace"]
        if type(dense) is not int or dense < 0:
            yield f"first_k_dense_replace={dense!r} must be a number of layers; restore the model's original config.json"
        experts, groups, used = (config[key] for key in ("n_routed_experts", "n_group", "topk_group"))
        if experts % groups or not 1 <= used <= groups:
            yield (
                f"n_group={groups} must divide n_routed_experts={experts}, and topk_group={used} be between 1 and it;"
                " restore the model's original config.json"
            )
        elif used < groups and config["num_experts_per_tok"] != 2 * used:
            yield (
                f"num_experts_per_tok={config['num_experts_per_tok']} must be twice topk_group={used}, because"
                " Megatron-core chooses groups by their best num_experts_per_tok / topk_group experts, and the model by"
                " their best two; use another model"
            )

    def attention_tensors(self, sizes: DecoderSizes) -> dict[str, tuple[int, ...]]:
        hidden, heads, latent = sizes.hidden_size, sizes.num_heads, _latent(sizes)
        return {
            "self_attn.q_a_proj.weight": (latent.query_rank, hidden),
            "self_attn.q_a_layernorm.weight": (latent.query_rank,),
            "self_attn.q_b_proj.weight": (sizes.q_size, latent.query_rank),
            "self_attn.kv_a_proj_with_mqa.weight": (latent.cached_size, hidden),
            "self_attn.kv_a_layernorm.weight": (latent.key_value_rank,),
            "self_attn.kv_b_proj.weight": (_key_value_rows(sizes), latent.key_value_rank),
            "self_attn.o_proj.weight": (hidden, heads * latent.value_head_dim),
        }

    def mlp_tensors(self, sizes: DecoderSizes, layer: int) -> dict[str, tuple[int, ...]]:
        tensors = super().mlp_tensors(sizes, layer)
        if experts := sizes.expert_layer(layer):
            tensors[_BIAS] = (experts.num_experts,)
            tensors |= gated_mlp(_SHARED, sizes.hidden_size, experts.shared_size)
        return tensors

    def megatron_attention(self, sizes: DecoderSizes, names: NameSet) -> tuple[Entry, ...]:
        start, (q_norm, kv_norm) = "self_attention.", _LATENT_NORMS[names]
        return (
            same(Whole, "input_layernorm.weight"),
            Columns(start + "linear_proj.weight", "self_attn.o_proj.weight"),
            Whole(start + "linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
            Whole(start + q_norm, "self_attn.q_a_layernorm.weight"),
            Stack(start + "linear_q_up_proj.weight", _query_rows(sizes)),
            Whole(start + "linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
            Whole(start + kv_norm, "self_attn.kv_a_layernorm.weight"),
            Stack(start + "linear_kv_up_proj.weight", _head_rows(sizes)),
        )

    def megatron_mlp(self, sizes: DecoderSizes, names: NameSet, layer: int) -> tuple[Entry, ...]:
        entries = super().megatron_mlp(sizes, names, layer)
        if sizes.expert_layer(layer) is None:
            return entries
        return (
            *entries,
            Whole("mlp.router.expert_bias", _BIAS),
            Stack(_SHARED + "linear_fc1.weight", _shared_rows(sizes)),
            Columns(_SHARED + "linear_fc2.weight", _SHARED + "down_proj.weight"),
        )

    def megatron_config(self, sizes: DecoderSizes) -> dict[str, Any]:
        latent, experts = _latent(sizes), _experts(sizes)
        limited = experts.num_active_groups < experts.num_groups
        config = super().megatron_config(sizes) | {
            "qk_layernorm": True,
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.key_value_rank,
            "qk_head_dim": latent.plain_head_dim,
            "qk_pos_emb_head_dim": latent.rotary_head_dim,
            "v_head_dim": latent.value_head_dim,
            "rope_type": "rope",
            "rotary_base": sizes.rope_theta,
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": False,
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
            "moe_router_num_groups": experts.num_groups if limited else None,
            "moe_router_group_topk": experts.num_active_groups if limited else None,
            "moe_router_topk_scaling_factor": experts.scale,
            "moe_shared_expert_intermediate_size": experts.shared_size,
        }
        if sizes.rope_scaling:
            scaling = dict(sizes.rope_scaling)
            config |= {"rope_type": "yarn", "rotary_scaling_factor": scaling.pop("factor"), **scaling}
        return config

    def vllm_attention(self, sizes: DecoderSizes) -> tuple[Entry, ...]:
        down = ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
        tensors = self.attention_tensors(sizes)
        return (
            # One unit each: every tensor rank holds the whole.
            Stack(
                "self_attn.fused_qkv_a_proj.weight",
                tuple(Rows(name, 0, tensors[name][0], 1) for name in down),
            ),
            same(Whole, "self_attn.q_a_layernorm.weight"),
            Stack("self_attn.q_b_proj.weight", _query_rows(sizes)),
            same(Whole, "self_attn.kv_a_layernorm.weight"),
            Stack("self_attn.kv_b_proj.weight", _head_rows(sizes)),
            same(Columns, "self_attn.o_proj.weight"),
        )

    def vllm_mlp(self, sizes: DecoderSizes, layer: int) -> tuple[Entry, ...]:
        entries = super().vllm_mlp(sizes, layer)
        if sizes.expert_layer(layer) is None:
            return entries
        return (
            *entries,
            same(Whole, _BIAS),
            Stack(_SHARED + "gate_up_proj.weight", _shared_rows(sizes)),
            same(Columns, _SHARED + "down_proj.weight"),
        )

    def vllm_problems(self, sizes: DecoderSizes) -> list[str]:
        latent = _latent(sizes)
        found = {"kv_lora_rank": latent.key_value_rank, "qk_rope_head_dim": latent.rotary_head_dim}
        return [
            f"{key}={found[key]} must be {size}, for which vLLM has kernels of latent attention; use another model"
            for key, size in _ENGINE_LATENT.items()
            if found[key] != size
        ]


def _latent(sizes: DecoderSizes) -> LatentSizes:
    assert sizes.latent is not None, "DeepSeek-V3 has latent attention"
    return sizes.latent


def _experts(sizes: DecoderSizes) -> ExpertSizes:
    assert sizes.experts is not None, "DeepSeek-V3 has experts"
    return sizes.experts


def _key_value_rows(sizes: DecoderSizes) -> int:
    """Return the rows of the projection to keys, without rotary dims, and values of all heads."""
    latent = _latent(sizes)
    return sizes.num_heads * (latent.plain_head_dim + latent.value_head_dim)


def _query_rows(sizes: DecoderSizes) -> tuple[Rows, ...]:
    return (Rows("self_attn.q_b_proj.weight", 0, sizes.q_size, sizes.num_heads),)


def _head_rows(sizes: DecoderSizes) -> tuple[Rows, ...]:
    return (Rows("self_attn.kv_b_proj.weight", 0, _key_value_rows(sizes), sizes.num_heads),)


def _shared_rows(sizes: DecoderSizes) -> tuple[Rows, ...]:
    size = _experts(sizes).shared_size
    return tuple(Rows(f"{_SHARED}{half}_proj.weight", 0, size, size) for half in ("gate", "up"))


DEEPSEEK_V3 = DeepseekV3(
    name="deepseek_v3",
    hf_prefix="DeepseekV3",
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
        "rope_interleave": True,
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    built_config={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "head_dim": 64,
    },
    rope_types=("default", "yarn"),
    expert_keys={
        "num_experts": "n_routed_experts",
        "num_active": "num_experts_per_tok",
        "ffn_hidden_size": "moe_intermediate_size",
        "num_dense_layers": "first_k_dense_replace",
        "num_shared": "n_shared_experts",
        "num_groups": "n_group",
        "num_active_groups": "topk_group",
        "scale": "routed_scaling_factor",
    },
    latent_keys={
        "query_rank": "q_lora_rank",
        "key_value_rank": "kv_lora_rank",
        "plain_head_dim": "qk_nope_head_dim",
        "rotary_head_dim": "qk_rope_head_dim",
        "value_head_dim": "v_head_dim",
    },
)
