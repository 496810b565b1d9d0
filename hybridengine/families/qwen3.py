"""Qwen3: an RMS norm over each query and key head."""

from __future__ import annotations

from hybridengine.families.family import Family
from hybridengine.families.qwen2 import WINDOW

QWEN3 = Family(
    name="qwen3",
    hf_prefix="Qwen3",
    defaults=WINDOW | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    qk_norm=True,
    window_switch=True,
)
