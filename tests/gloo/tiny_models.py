"""Small Hugging Face checkpoints in which every weight is random, norms and biases too, so that each of them matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hybridengine.families.registry import FAMILIES
from tests.unit.model_configs import IMAGE_TOKENS, vision_entries

SIZES = {
    "vocab_size": 131,  # prime: no degree divides it
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,  # uneven pipeline stages for p = 2
    "num_attention_heads": 8,
    "num_key_value_heads": 4,  # grouped-query attention
    "head_dim": 16,
    "max_position_embeddings": 128,
}

EXPERTS = {"num_experts": 8, "num_active": 2, "ffn_hidden_size": 48}
"""Fields of `ExpertSizes`."""

YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,  # not mscale, so that the factor of sines matters as well as that of scores
}
"""Rotary scaling of a context of 64 tokens."""
FEATURES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 4, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.15,
        "logits_scaling": 1.5,
    },
}
"""Family -> entries of the configuration that make its peculiarities matter in a short sequence."""
CENTRED = ("gemma3_text",)
"""Families whose norms multiply by 1 + weight."""


def write_model(
    folder: Path, family: str, tied: bool = False, dtype: str = "float32", num_labels: int = 0, **sizes: Any
) -> PreTrainedModel:
    """Save a random model in `folder` and return it.

    Args:
        num_labels: outputs of a score head instead of a language-model head; 0 for a language model.
        sizes: entries of the configuration that differ from `SIZES`.
    """
    described = FAMILIES[family]
    labels = {"num_labels": num_labels} if num_labels else {}
    experts = {key: EXPERTS[field] for field, key in described.expert_keys.items() if field in EXPERTS}
    values = {
        **SIZES,
        **experts,
        **described.built_config,
        **FEATURES.get(family, {}),
        **labels,
        **sizes,
        "tie_word_embeddings": tied,
    }
    if described.latent_keys:
        values["num_key_value_heads"] = values["num_attention_heads"]
        values["head_dim"] = values["qk_rope_head_dim"]
    if described.has_vision:
        del values["head_dim"]
        values = {
            **IMAGE_TOKENS,
            **vision_entries(values["hidden_size"], values["num_attention_heads"]),
            **values,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    config = getattr(transformers, f"{described.hf_prefix}Config")(**values)
    model: PreTrainedModel = getattr(transformers, described.architectures[bool(num_labels)])(config)
    generator = torch.Generator().manual_seed(20)
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name and family not in CENTRED else 0.0
        parameter.data.normal_(mean, 0.15, generator=generator)
    model.to(getattr(torch, dtype))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # of float32 in any model
            buffer.data = torch.empty_like(buffer, dtype=torch.float32).normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model
