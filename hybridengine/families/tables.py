"""A model's sizes, and table entries: a backend's parameter as rows and columns of logical tensors.

A logical tensor is a tensor of the Hugging Face checkpoint, by its name and whole shape. Entries describe one decoder
layer; their names have no layer prefix. `hybridengine.reshard.tables` turns an entry into the parameter of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of one model: all that a family needs to know of it to write its tables."""

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


class NameSet(str, Enum):
    """The layer spec that named Megatron's parameters."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"
    """The norms before QKV and before the MLP are fused into the linear layers that follow them."""


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a logical tensor, shared out in whole units: heads, or single rows of an MLP."""

    tensor: str
    start: int
    stop: int
    units: int
    """Equal units that the rows consist of. Where tensor ranks outnumber them, consecutive ranks hold the same unit."""


@dataclass(frozen=True)
class Whole:
    """A parameter that is a logical tensor, the same on every tensor rank."""

    name: str
    tensor: str


@dataclass(frozen=True)
class Columns:
    """A parameter that is an equal share of the columns of a logical tensor."""

    name: str
    tensor: str


@dataclass(frozen=True)
class Stack:
    """A parameter that is a share of the rows of each section, one section below the other."""

    name: str
    sections: tuple[Rows, ...]
    groups: int | None = None
    """Each rank stacks once for each of its groups, as Megatron's QKV does for each key head; None: once."""


Entry = Whole | Columns | Stack
