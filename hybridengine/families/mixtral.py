"""Mixtral: Mistral's attention, and experts in every layer, each as large as the MLP of a dense model."""

from __future__ import annotations

from hybridengine.families.experts import MixtureFamily

MIXTRAL = MixtureFamily(
    name="mixtral",
    hf_prefix="Mixtral",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    built_config={"sliding_window": None},
    has_window=True,
    block="block_sparse_moe.",
    halves=("w1", "w3"),
    down="w2",
    expert_keys={
        "num_experts": "num_local_experts",
        "num_active": "num_experts_per_tok",
        "ffn_hidden_size": "intermediate_size",
    },
)
