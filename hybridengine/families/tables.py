"""A model's sizes, and table entries that describe a backend's parameter as rows and columns of logical tensors.

A logical tensor is a tensor of the Hugging Face checkpoint, identified by its name and unsharded shape. Entries describe
one decoder layer, without the layer prefix. `hybridengine.reshard.tables` turns an entry into the parameter of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of one model that a family needs to write its tables."""

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
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


class NameSet(str, Enum):
    """Layer spec that determines the names of Megatron's parameters."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"
    """The norms before QKV and before the MLP are fused into the following linear layers."""


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a logical tensor, divided in whole units: heads, or single rows of an MLP."""

    tensor: str
    start: int
    stop: int
    units: int
    """Number of equal units. Where there are more tensor ranks than units, consecutive ranks hold the same unit."""


@dataclass(frozen=True)
class Whole:
    """A parameter that is a whole logical tensor, the same on every tensor rank."""

    name: str
    tensor: str


@dataclass(frozen=True)
class Columns:
    """A parameter that is an equal share of the columns of a logical tensor."""

    name: str
    tensor: str


@dataclass(frozen=True)
class Stack:
    """A parameter that stacks a share of the rows of each section, in order."""

    name: str
    sections: tuple[Rows, ...]
    groups: int | None = None
    """Number of groups stacked one after another, as Megatron's QKV does per key head; None for a single stack."""


Entry = Whole | Columns | Stack
