"""Rules for the `config.json` of a dense decoder: types and bounds of values, and unsupported features.

A null value counts as missing, as in transformers, unless null has a meaning for its key. Each check raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from hybridengine.errors import ConfigError, shown
from hybridengine.families.family import Family

MAX_SIZE = 2**24
"""Largest dimension or count: beyond any vocabulary or context length."""
MAX_PARAMETERS = 10**13
"""Largest number of parameters; byte totals over the ranks of a node then fit 64 bits."""
_REQUIRED_SIZES = {
    "num_hidden_layers": 1_000,
    "hidden_size": MAX_SIZE,
    "intermediate_size": MAX_SIZE,
    "num_attention_heads": 1_024,
    "vocab_size": MAX_SIZE,
}
_OPTIONAL_SIZES = {
    "num_key_value_heads": 256,
    "head_dim": MAX_SIZE,
    "max_position_embeddings": MAX_SIZE,
    "num_labels": MAX_SIZE,
}
_EXPERT_SIZES = {
    "num_experts": 16_384,
    "num_active": 16_384,
    "ffn_hidden_size": MAX_SIZE,
    "num_shared": 1_024,
    "num_groups": 16_384,
    "num_active_groups": 16_384,
}
"""Key of a size, or field of `ExpertSizes` -> its largest value, several times that of any known model: large values take
long to plan."""
MAX_NUMBER = 1e18

_KINDS: dict[str, tuple[type, str]] = {
    "architectures": (list, "a list"),
    "layer_types": (list, "a list"),
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
    "text_config": (dict, "an object"),
    "vision_config": (dict, "an object"),
    "id2label": (dict, "an object"),
    "tie_word_embeddings": (bool, "true or false"),
    "norm_topk_prob": (bool, "true or false"),
    "attention_bias": (bool, "true or false"),
    "use_sliding_window": (bool, "true or false"),
}
_MEANINGFUL_NULLS = ("num_key_value_heads", "sliding_window", "q_lora_rank")
"""Keys for which null has a meaning: one key head per query head, no window, queries without a latent vector."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_RESTORE = "restore the model's original config.json"


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` without nulls, at the top level and in nested objects, except those that have a meaning."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value is not None or key in _MEANINGFUL_NULLS
    }


def check_kinds(config: Mapping[str, Any]) -> None:
    """Check that each value has the type that its key requires; nulls have been removed."""
    for key, (kind, name) in _KINDS.items():
        if key in config and not isinstance(config[key], kind):
            raise ConfigError(f"{key}={shown(config[key])} must be {name}; {_RESTORE}")


def check_sizes(config: Mapping[str, Any], family: Family) -> None:
    """Check that all sizes are present, positive and plausible; the error lists those that are not."""
    optional = {key: limit for key, limit in _OPTIONAL_SIZES.items() if config.get(key) is not None}
    experts = {key: _EXPERT_SIZES[name] for name, key in family.expert_keys.items() if name in _EXPERT_SIZES}
    latent = dict.fromkeys(family.latent_keys.values(), MAX_SIZE)
    wrong = [
        f"{key}={shown(config.get(key))} (at most {limit})"
        for key, limit in (_REQUIRED_SIZES | experts | latent | optional).items()
        if type(config.get(key)) is not int or not 0 < config[key] <= limit  # bool is a subclass of int
    ]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} must be positive integers (null: missing); {_RESTORE}")


def check_numbers(numbers: Mapping[str, Any]) -> None:
    """Check that all values are positive and finite."""
    for key, value in numbers.items():
        if not is_number(value) or not 0 < value <= MAX_NUMBER:
            raise ConfigError(f"{key}={shown(value)} must be a positive number; {_RESTORE}")


def check_features(config: Mapping[str, Any], architecture: str, family: Family) -> None:
    """Check that the model is one of `family`, without unsupported features; the error names the first."""
    for problem in chain(_unsupported(config, architecture, family), family.refusals(config)):
        raise ConfigError(problem)


def _unsupported(config: Mapping[str, Any], architecture: str, family: Family) -> Iterator[str]:
    for key in _NUM_EXPERTS:
        if config.get(key) and family.experts_of(config) is None:
            yield f"{key}={shown(config[key])}: {family.name} has no experts; use another model, or {_RESTORE}"
    model_type = config.get("model_type") or family.name
    if model_type != family.name:
        yield (
            f"model_type={shown(model_type)} is not the {family.name!r} of architectures=[{architecture!r}]; use a model"
            f" of a supported family, or {_RESTORE}"
        )
    if config.get("quantization_config"):
        yield "quantization_config is not supported; use the model's unquantised weights"


def is_number(value: object) -> bool:
    return type(value) in (int, float)
