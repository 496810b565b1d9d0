"""Mistral 7B, Nemo and Small: Llama's layers, with windowed attention unless config.json disables it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridengine.families.family import Family


class Mistral(Family):
    """Mistral; transformers reads a config.json with `layer_types` as one of Ministral, another model."""

    def window_refusals(self, config: Mapping[str, Any]) -> Iterator[str]:
        window = config["sliding_window"]
        if config.get("layer_types") and window is not None:
            yield (
                f"layer_types with sliding_window={window} are not supported; leave layer_types out if all layers have"
                " the window, or set sliding_window to null if none has"
            )
        else:
            yield from super().window_refusals(config)


MISTRAL = Mistral(
    name="mistral",
    hf_prefix="Mistral",
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    built_config={"sliding_window": None},
    has_window=True,
)
