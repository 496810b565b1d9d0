"""Contents of small models' config.json."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
}


def plain(**changes: Any) -> dict[str, Any]:
    """Contents of a Llama config.json without rotary settings."""
    return {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **SIZES, **changes}
