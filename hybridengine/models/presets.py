"""Shapes of well-known models by name, and of other models by their `config.json`.

A preset is the part of a public repository's `config.json` that determines the tensors. Base and instruction-tuned models
may differ (positions, norm epsilon); a preset matches the repository that it names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybridengine.errors import CheckpointError, ConfigError
from hybridengine.models.shapes import ModelShape


@dataclass(frozen=True)
class Preset:
    name: str
    repository: str
    """Hugging Face repository that the values come from."""
    config: Mapping[str, Any]
    """Values of its `config.json` that determine the shape."""

    def shape(self) -> ModelShape:
        return ModelShape.from_hf_config(self.config)


_COLUMNS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)


def _preset(name: str, repository: str, architecture: str, *values: float, **others: object) -> Preset:
    """Return a preset with the `values` of `_COLUMNS`, in order, and `others`."""
    config = {"architectures": [architecture], **dict(zip(_COLUMNS, values, strict=True)), **others}
    return Preset(name, repository, MappingProxyType(config))


_LLAMA, _QWEN2, _QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
_QWEN3_MOE, _MIXTRAL = "Qwen3MoeForCausalLM", "MixtralForCausalLM"
_QWEN3_EXPERTS: dict[str, object] = {
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}
_MIXTRAL_EXPERTS: dict[str, object] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
_LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEEPSEEK_V3: dict[str, object] = {  # other sizes are transformers' defaults, which the family has
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

_QWEN2_5_VL: dict[str, object] = {  # the family has the other sizes of the tower
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
}

# fmt: off
_PRESETS = (
    _preset("llama3-8b", "meta-llama/Meta-Llama-3-8B-Instruct",
            _LLAMA, 32, 4096, 14336, 32, 8, 128256, 8192, 1e-5, 5e5),
    _preset("llama3-70b", "meta-llama/Meta-Llama-3-70B-Instruct",
            _LLAMA, 80, 8192, 28672, 64, 8, 128256, 8192, 1e-5, 5e5),
    _preset("llama3-405b", "meta-llama/Llama-3.1-405B-Instruct",
            _LLAMA, 126, 16384, 53248, 128, 8, 128256, 131072, 1e-5, 5e5, rope_scaling=_LLAMA31_ROPE),
    _preset("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct",
            _QWEN2, 28, 3584, 18944, 28, 4, 152064, 32768, 1e-6, 1e6),
    _preset("qwen2.5-32b", "Qwen/Qwen2.5-32B-Instruct",
            _QWEN2, 64, 5120, 27648, 40, 8, 152064, 32768, 1e-6, 1e6),
    _preset("qwen2.5-72b", "Qwen/Qwen2.5-72B-Instruct",
            _QWEN2, 80, 8192, 29568, 64, 8, 152064, 32768, 1e-6, 1e6),
    _preset("qwen3-8b", "Qwen/Qwen3-8B",
            _QWEN3, 36, 4096, 12288, 32, 8, 151936, 40960, 1e-6, 1e6, head_dim=128),
    _preset("qwen3-32b", "Qwen/Qwen3-32B",
            _QWEN3, 64, 5120, 25600, 64, 8, 151936, 40960, 1e-6, 1e6, head_dim=128),
    _preset("llama2-7b", "meta-llama/Llama-2-7b-hf",
            _LLAMA, 32, 4096, 11008, 32, 32, 32000, 4096, 1e-5, 1e4),
    _preset("llama2-13b", "meta-llama/Llama-2-13b-hf",
            _LLAMA, 40, 5120, 13824, 40, 40, 32000, 4096, 1e-5, 1e4),
    _preset("llama2-70b", "meta-llama/Llama-2-70b-hf",
            _LLAMA, 80, 8192, 28672, 64, 8, 32000, 4096, 1e-5, 1e4),
    _preset("codellama-34b", "codellama/CodeLlama-34b-hf",
            _LLAMA, 48, 8192, 22016, 64, 8, 32000, 16384, 1e-5, 1e6),
    _preset("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3",
            "MistralForCausalLM", 32, 4096, 14336, 32, 8, 32768, 32768, 1e-5, 1e6, sliding_window=None),
    _preset("phi-4", "microsoft/phi-4",
            "Phi3ForCausalLM", 40, 5120, 17920, 40, 10, 100352, 16384, 1e-5, 2.5e5),
    _preset("gemma3-1b", "google/gemma-3-1b-it",
            "Gemma3ForCausalLM", 26, 1152, 6912, 4, 1, 262144, 32768, 1e-6, 1e6, head_dim=256, sliding_window=512),
    _preset("glm4-32b", "zai-org/GLM-4-32B-0414",
            "Glm4ForCausalLM", 61, 6144, 23040, 48, 2, 151552, 32768, 1e-5, 1e4, attention_bias=False),
    _preset("granite3.3-8b", "ibm-granite/granite-3.3-8b-instruct",
            "GraniteForCausalLM", 40, 4096, 12800, 32, 8, 49159, 131072, 1e-5, 1e7, tie_word_embeddings=True,
            embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0078125, logits_scaling=16.0),
    _preset("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B",
            _QWEN3_MOE, 48, 2048, 6144, 32, 4, 151936, 40960, 1e-6, 1e6, **_QWEN3_EXPERTS, moe_intermediate_size=768),
    _preset("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B",
            _QWEN3_MOE, 94, 4096, 12288, 64, 4, 151936, 40960, 1e-6, 1e6, **_QWEN3_EXPERTS, moe_intermediate_size=1536),
    _preset("mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1",
            _MIXTRAL, 32, 4096, 14336, 32, 8, 32000, 32768, 1e-5, 1e6, **_MIXTRAL_EXPERTS, router_aux_loss_coef=0.02),
    _preset("mixtral-8x22b", "mistralai/Mixtral-8x22B-Instruct-v0.1",
            _MIXTRAL, 56, 6144, 16384, 48, 8, 32768, 65536, 1e-5, 1e6, **_MIXTRAL_EXPERTS, router_aux_loss_coef=0.001),
    _preset("deepseek-v3", "deepseek-ai/DeepSeek-V3",
            "DeepseekV3ForCausalLM", 61, 7168, 18432, 128, 128, 129280, 163840, 1e-6, 1e4, **_DEEPSEEK_V3),
    _preset("qwen2.5-vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct",
            "Qwen2_5_VLForConditionalGeneration", 28, 3584, 18944, 28, 4, 152064, 128000, 1e-6, 1e6, **_QWEN2_5_VL),
)
# fmt: on

PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _PRESETS})
"""Preset name -> preset. The Llama 2 and CodeLlama sizes are those of the paper's tables (7B, 13B, 34B, 70B)."""


def find_preset(text: str) -> Preset | None:
    """Return the preset with a name or repository, ignoring case and hyphens; None if there is none."""
    wanted = _plain(text)
    for preset in PRESETS.values():
        if wanted in map(_plain, (preset.name, preset.repository, Path(preset.repository).name)):
            return preset
    return None


def resolve_model(text: str) -> ModelShape:
    """Return the shape of the preset, `config.json` or folder (./NAME) in `text`; ConfigError if none is supported."""
    preset = find_preset(text)
    if preset is not None:
        return preset.shape()
    try:
        if not text.strip():
            raise CheckpointError("an empty text names no file; name a config.json or a checkpoint folder")
        return ModelShape.from_folder(text)
    except ConfigError as error:
        raise ConfigError(f"model {text}: {error}") from None
    except CheckpointError as error:
        near = difflib.get_close_matches(text.lower(), PRESETS, n=2, cutoff=0.6)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        known = ", ".join(PRESETS)
        raise ConfigError(
            f"model {text!r} is not a preset ({meant}presets are {known}), and {error}"
        ) from None


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]", "", text.lower())
