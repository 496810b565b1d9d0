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


VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
"""Sizes of vision towers: patches of 4 x 4 pixels, of which 2 x 2 are a token, and windows of 2 x 2 tokens."""
IMAGE_TOKENS = {
    "vision_start_token_id": 127,
    "image_token_id": 128,
    "vision_end_token_id": 129,
    "video_token_id": 130,
}


def vision_entries(hidden_size: int, num_heads: int) -> dict[str, Any]:
    """Return what a config.json of Qwen2.5-VL has beside a decoder's sizes and the tokens of images."""
    half = hidden_size // num_heads // 2
    part = max(1, half // 4)
    sections = [part, part, half - 2 * part]
    return {
        "vision_config": {**VISION, "out_hidden_size": hidden_size},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections},
    }
