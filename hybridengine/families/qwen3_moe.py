"""Qwen3-MoE: Qwen3's attention, and experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridengine.families.experts import MixtureFamily


class Qwen3Moe(MixtureFamily):
    """Qwen3-MoE, whose configuration could also give some layers an MLP."""

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        # transformers 5 writes the number of experts under another name than the published files have.
        renamed = {"num_experts": config["num_local_experts"]} if "num_local_experts" in config else {}
        return {**super().completed(config), **renamed}

    def refusals(self, config: Mapping[str, Any]) -> Iterator[str]:
        yield from super().refusals(config)
        if config["decoder_sparse_step"] != 1 or config["mlp_only_layers"]:
            yield (
                f"decoder_sparse_step={config['decoder_sparse_step']} with mlp_only_layers={config['mlp_only_layers']} is"
                " not supported; use a model with experts in every layer"
            )


QWEN3_MOE = Qwen3Moe(
    name="qwen3_moe",
    hf_prefix="Qwen3Moe",
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    built_config={"norm_topk_prob": True},
    qk_norm=True,
    expert_keys={
        "num_experts": "num_experts",
        "num_active": "num_experts_per_tok",
        "ffn_hidden_size": "moe_intermediate_size",
        "normalizes": "norm_topk_prob",
    },
)
