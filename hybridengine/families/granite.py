"""Granite 3 and 4.1 (dense): Llama's layers, with factors of embeddings, outputs, attention scores and logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridengine.families.family import Family
from hybridengine.families.sizes import Multipliers

_BY_LAYER = ("layer_types", "layer_rope_theta", "attention_sinks")
"""Keys of Granite with windows, for which vLLM's model of either has attention sinks."""


class Granite(Family):
    """Granite, whose `logits_scaling` divides."""

    def multipliers_of(self, config: Mapping[str, Any]) -> Multipliers | None:
        return Multipliers(
            float(config["embedding_multiplier"]),
            float(config["residual_multiplier"]),
            1.0 / config["logits_scaling"],
        )

    def query_scalar_of(self, config: Mapping[str, Any]) -> float | None:
        return float(config["attention_multiplier"] ** -2)

    def window_refusals(self, config: Mapping[str, Any]) -> Iterator[str]:
        for key in _BY_LAYER:
            if config.get(key):
                yield f"{key} is not supported for granite; use a model with the same attention in all layers"


GRANITE = Granite(
    name="granite",
    hf_prefix="Granite",
    defaults={
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    built_config={"attention_multiplier": 0.125},
    number_keys=("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    has_classifier=False,
)
