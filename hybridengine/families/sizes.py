"""Sizes of a model: of its decoder, and of the parts that some models have in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class ExpertSizes:
    """Mixture-of-experts layers of one model, and how they route tokens."""

    num_experts: int
    num_active: int
    """Experts that compute each token."""
    ffn_hidden_size: int
    """Intermediate size of one expert."""
    num_dense_layers: int = 0
    """First layers of the model, which have an MLP in place of experts."""
    normalizes: bool = True
    """True if the weights of a token's experts add up to 1."""
    num_shared: int = 0
    """Experts that compute every token; together they are one MLP."""
    num_groups: int = 1
    """Groups of consecutive experts."""
    num_active_groups: int = 1
    """Groups from which the experts of a token are chosen."""
    scale: float = 1.0
    """Factor of the weights of a token's experts."""

    @property
    def shared_size(self) -> int:
        """Intermediate size of the MLP that computes every token; 0 for none."""
        return self.num_shared * self.ffn_hidden_size


@dataclass(frozen=True, order=True)
class LatentSizes:
    """Multi-head latent attention, which makes the queries, and the keys and values, from short vectors."""

    query_rank: int
    """Size of the vector of queries."""
    key_value_rank: int
    """Size of the vector of keys and values, which an engine caches."""
    plain_head_dim: int
    """First dims of a head's query and key, without positions."""
    rotary_head_dim: int
    """Last dims of a head's query and key, with rotary positions; all heads have the same key there."""
    value_head_dim: int

    @property
    def head_dim(self) -> int:
        return self.plain_head_dim + self.rotary_head_dim

    @property
    def cached_size(self) -> int:
        """Elements of a token in a layer's cache, the same on every tensor rank."""
        return self.key_value_rank + self.rotary_head_dim


@dataclass(frozen=True, order=True)
class Multipliers:
    """Factors of a model whose parts are scaled."""

    embedding: float
    """Factor of the embeddings of tokens."""
    residual: float
    """Factor of the outputs of attention and MLP, before they are added to the residual stream."""
    logits: float


@dataclass(frozen=True, order=True)
class VisionSizes:
    """Frozen vision tower of a model that reads images, and how its outputs join the tokens."""

    image_token: int
    """Token in whose place the tower's outputs are read, one after another."""
    begin_token: int
    """Token before an image."""
    end_token: int
    """Token after an image."""
    patch_size: int
    """Height and width of a patch, in pixels."""
    merge_size: int
    """Height and width of a token, in patches."""
    num_frames: int
    """Frames of a patch; an image is as many equal ones."""
    sections: tuple[int, int, int]
    """Rotary frequencies of a head that turn with the frame, the row and the column of a token."""
    depth: int
    """Blocks of the tower."""
    hidden_size: int
    ffn_hidden_size: int

    @property
    def side(self) -> int:
        """Height and width of a token, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_values(self) -> int:
        """Colour values of a patch."""
        return 3 * self.num_frames * self.patch_size**2


@dataclass(frozen=True)
class AdapterSizes:
    """Low-rank adapters of a model's linear layers, whose own weights are frozen: W + alpha / rank * B A."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    """Adapted layers, by the last part of Megatron's names."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


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
    rope_type: str = "default"
    """Kind of rotary embeddings: "default", or how their frequencies are scaled."""
    rope_scaling: tuple[tuple[str, float | str], ...] = ()
    """Settings of `rope_type` as (key, value) pairs in a fixed order; empty for plain rotary embeddings."""
    num_labels: int = 0
    """Outputs of a sequence-classification head (`score.weight`); 0 for a language model."""
    experts: ExpertSizes | None = None
    """Experts of a mixture of experts; None for a dense model."""
    latent: LatentSizes | None = None
    """Sizes of multi-head latent attention; None for plain attention."""
    adapters: AdapterSizes | None = None
    """Adapters that are trained in place of the weights; None for a model without."""
    windows: tuple[int, ...] = ()
    """For each layer, the number of last positions that a token attends to, its own included; 0 for all of them.
    Empty if all layers attend to all positions."""
    window_rope_theta: float | None = None
    """Base of the rotary embeddings of layers with a window, whose frequencies are not scaled; None if all layers have
    the same rotary embeddings."""
    rotary_dim: int | None = None
    """First dims of a head with rotary positions; None for all of them."""
    qkv_bias: bool | None = None
    """True if q, k and v have a bias, for a family in which models differ; None for others."""
    query_scalar: float | None = None
    """Attention scores are divided by its square root; None for head_dim."""
    multipliers: Multipliers | None = None
    """Factors of the model's parts; None for a model without."""
    vision: VisionSizes | None = None
    """Vision tower of a model that reads images; None for others."""

    @property
    def merges_adapters(self) -> bool:
        """True if engines have no adapters of their own, but weights with the adapters merged in."""
        return self.adapters is not None and self.experts is not None

    def window(self, layer: int) -> int:
        """Return the number of last positions that a token of a layer attends to; 0 for all of them."""
        return self.windows[layer] if self.windows else 0

    def expert_layer(self, layer: int) -> ExpertSizes | None:
        """Return the experts of a layer; None if it has an MLP."""
        return self.experts if self.experts and layer >= self.experts.num_dense_layers else None

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim
