"""Phi-3 and Phi-4 (14B): q, k and v are stored as one tensor, and so are gate and up."""

from __future__ import annotations

from hybridengine.families.family import Family, Rows
from hybridengine.families.sizes import DecoderSizes

_QKV = "self_attn.qkv_proj.weight"


class Phi3(Family):
    """Phi-3 with its fused tensors."""

    def attention_tensors(self, sizes: DecoderSizes) -> dict[str, tuple[int, ...]]:
        hidden = sizes.hidden_size
        return {
            _QKV: (sizes.q_size + 2 * sizes.kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, sizes.q_size),
        }

    def qkv_rows(self, sizes: DecoderSizes, kind: str) -> tuple[Rows, ...]:
        key, value = sizes.q_size, sizes.q_size + sizes.kv_size
        return (
            Rows(_QKV, 0, key, sizes.num_heads),
            Rows(_QKV, key, value, sizes.num_kv_heads),
            Rows(_QKV, value, value + sizes.kv_size, sizes.num_kv_heads),
        )


PHI3 = Phi3(
    name="phi3",
    hf_prefix="Phi3",
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    built_config={"pad_token_id": None},  # transformers defaults to 32000, which a small vocabulary lacks
    has_window=True,
    rope_types=("default",),
    fused_gate_up=True,
    whole_slots=True,
)
