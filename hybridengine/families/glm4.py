"""GLM-4-0414 and GLM-Z1 (dense): norms of outputs, and rotary embeddings of neighbouring dims in a part of each head."""

from __future__ import annotations

from hybridengine.families.family import Family

GLM4 = Family(
    name="glm4",
    hf_prefix="Glm4",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    built_config={"pad_token_id": None},  # transformers defaults to 151329, which a small vocabulary lacks
    rope_types=("default",),
    partial_rotary=True,
    interleaved_rotary=True,
    qkv_bias=None,
    post_norms=("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"),
    fused_gate_up=True,
)
