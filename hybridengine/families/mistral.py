"""Mistral 7B, Nemo and Small: Llama's layers, with windowed attention unless config.json disables it."""

from __future__ import annotations

from hybridengine.families.family import Family

MISTRAL = Family(
    name="mistral",
    hf_prefix="Mistral",
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    built_config={"sliding_window": None},
    has_window=True,
)
