"""Qwen2 and Qwen2.5: q, k and v have a bias."""

from __future__ import annotations

from hybridengine.families.family import Family
from hybridengine.families.sizes import DecoderSizes

WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
"""Values of the keys of windowed attention that transformers assumes."""


class Qwen2(Family):
    """Qwen2 with the restrictions of vLLM's model."""

    def vllm_problems(self, sizes: DecoderSizes) -> list[str]:
        if sizes.q_size == sizes.hidden_size:
            return []
        return [
            f"head_dim={sizes.head_dim} with num_heads={sizes.num_heads} and hidden_size={sizes.hidden_size}: vLLM's"
            f" Qwen2 takes hidden_size / num_heads for it; use a model with head_dim"
            f" {sizes.hidden_size // sizes.num_heads}"
        ]


QWEN2 = Qwen2(
    name="qwen2",
    hf_prefix="Qwen2",
    defaults=WINDOW | {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    qkv_bias=True,
    window_switch=True,
)
