"""The section `model.build`: a small model with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hybridengine.config.values import Count, Positive, Section
from hybridengine.errors import ConfigError
from hybridengine.families.registry import FAMILIES
from hybridengine.models.shapes import ModelShape

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(name for name, family in FAMILIES.items() if not family.has_vision)]

BUILT_TOKENS = 57
"""Number of tokens of the tokenizer that is built with a model."""
HF_KEYS = {
    "family": "model_type",
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""Names in a Hugging Face `config.json` of the values of `model.build` that it names differently."""


EXPERT_FIELDS = {
    "num_experts": "num_experts",
    "num_active_experts": "num_active",
    "expert_ffn_hidden_size": "ffn_hidden_size",
}
"""Value of `model.build` -> field of `ExpertSizes`."""


class BuildSection(Section):
    """A small model that is built with random weights and its own tokenizer."""

    family: FamilyName = "qwen3"
    """Model family."""
    num_layers: Count = 4
    """Decoder layers."""
    hidden_size: Count = 128
    """Width of the residual stream."""
    ffn_hidden_size: Count = 384
    """Width of the MLP."""
    num_experts: Count = 8
    """Experts of a layer, for families that are mixtures of experts."""
    num_active_experts: Count = 2
    """Experts that compute each token."""
    expert_ffn_hidden_size: Count = 64
    """Width of an expert."""
    num_heads: Count = 4
    """Query heads."""
    num_kv_heads: Count = 2
    """Key and value heads."""
    head_dim: Count = 32
    """Width of a head; vLLM on a CPU needs a multiple of 32."""
    vocab_size: Count = BUILT_TOKENS
    """Rows of the embedding, at least the number of the tokenizer's tokens."""
    max_positions: Count = 256
    """Longest sequence of prompt and response."""
    tied_embeddings: bool = True
    """True if the output head shares the embedding's weights."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    init_std: Positive = 0.02
    """Standard deviation of the random weights."""

    def hf_config(self) -> dict[str, Any]:
        """Return the contents of the model's Hugging Face `config.json`."""
        family = FAMILIES[self.family]
        values = self.model_dump()
        experts = {field: values.pop(name) for name, field in EXPERT_FIELDS.items()}
        return {
            "architectures": [family.architectures[0]],
            **{HF_KEYS.get(name, name): value for name, value in values.items()},
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            **family.built_config,
            **{key: experts[field] for field, key in family.expert_keys.items() if field in experts},
        }

    def shape(self) -> ModelShape:
        """Return the shape of the model; raise ConfigError if the sizes do not fit together."""
        try:
            return ModelShape.from_hf_config(self.hf_config())
        except ConfigError as error:
            broken = str(error).rpartition(";")[0].replace(" of config.json", "")
            for name, key in HF_KEYS.items():
                broken = broken.replace(key, name)
            raise ConfigError(f"{broken}; choose other values beneath model.build") from None
