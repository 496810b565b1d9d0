"""The sizes of a decoder model: all that a family needs to know of a model to write its tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes and numbers of one model."""

    family: str
    """Name in the registry of families."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float | str], ...] = ()
    """Llama 3's frequency scaling as sorted (key, value) pairs; empty for plain rotary embeddings."""
    num_labels: int = 0
    """Outputs of a sequence-classification head (`score.weight`); 0 for a language model."""

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim
