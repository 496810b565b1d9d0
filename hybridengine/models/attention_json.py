"""Attention in a `config.json`: rotary embeddings, of all layers and of those with a window, and windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridengine.errors import ConfigError, shown
from hybridengine.families.family import Family
from hybridengine.models.config_json import check_numbers, is_number

_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Kind of rotary embeddings -> numbers that it needs."""
_OPTIONS = {"yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")}
"""Kind of rotary embeddings -> numbers that it may have."""
_LATENT_NUMBERS = {"yarn": (*_NUMBERS["yarn"], "beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
"""Kind of rotary embeddings -> numbers that it needs, and no others, in latent attention, whose defaults differ between
libraries."""


def rotary_settings(config: Mapping[str, Any], family: Family, head_dim: int) -> dict[str, Any]:
    """Return the rotary settings of either config style: transformers 5 nests them, earlier versions do not."""
    nested: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        style = {
            "rope_type" if name == "type" else name: value for name, value in config.get(key, {}).items()
        }
        if any(nested.get(name, value) != value for name, value in style.items()):
            raise ConfigError(
                "rope_parameters and rope_scaling say different things; restore the model's original config.json"
            )
        nested |= style
    theta = nested.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = nested.get("rope_type", "default")
    if layered := [key for key, value in nested.items() if isinstance(value, dict)]:
        raise ConfigError(
            f"rotary settings by kind of layer ({shown(layered[0])}) are not supported; use another model"
        )
    partial = nested.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    check_numbers({"rope_theta": theta})
    if kind not in family.rope_types:
        choices = " or ".join(repr(known) for known in family.rope_types)
        raise ConfigError(f"rope_type={kind!r} is not supported; use {choices}")
    window_theta = family.window_theta_of(config)
    if window_theta is not None:
        check_numbers({"rope_theta of windows": window_theta})
        window_theta = float(window_theta)
    plain = {
        "rope_theta": float(theta),
        "window_rope_theta": window_theta,
        "rotary_dim": _rotary_dim(partial, family, head_dim),
    }
    if kind == "default":
        return plain
    return plain | {"rope_type": kind, "rope_scaling": _scaling(kind, nested, config, family)}


def _rotary_dim(partial: Any, family: Family, head_dim: int) -> int | None:
    """Return the number of rotary dims of a head for `partial_rotary_factor`, as all libraries round it; None for all."""
    if partial == 1.0:
        return None
    if not family.partial_rotary:
        raise ConfigError(
            f"partial_rotary_factor={shown(partial)} is not supported for {family.name}; it must be 1.0"
        )
    dim = int(head_dim * partial) if is_number(partial) and 0 < partial < 1 else 0
    if dim < 2 or dim % 2:
        raise ConfigError(
            f"partial_rotary_factor={shown(partial)} of head_dim={head_dim} must be between 0 and 1 and give an even"
            " number of dims; restore the model's original config.json"
        )
    return dim


def _scaling(
    kind: str, nested: Mapping[str, Any], config: Mapping[str, Any], family: Family
) -> tuple[tuple[str, float], ...]:
    """Return the numbers of a kind of rotary embeddings."""
    needed, optional = _NUMBERS[kind], _OPTIONS.get(kind, ())
    if family.latent_keys:
        needed, optional = _LATENT_NUMBERS[kind], ()
    missing = [key for key in needed if not is_number(nested.get(key))]
    if missing:
        raise ConfigError(
            f"rope_type={kind!r} needs the numbers {', '.join(missing)}; restore the model's original config.json"
        )
    if family.latent_keys and "attention_factor" in nested:
        raise ConfigError(
            f"attention_factor={shown(nested['attention_factor'])} of rope_type={kind!r} is not supported; remove it"
        )
    scaling = {key: nested[key] for key in (*needed, *optional) if key in nested}
    check_numbers(scaling)
    if nested.get("truncate", True) is not True:
        raise ConfigError(
            f"truncate={shown(nested['truncate'])} of rope_type={kind!r} is not supported; it must be true"
        )
    reached = scaling["factor"] * scaling.get("original_max_position_embeddings", math.inf)
    if kind == "yarn" and config["max_position_embeddings"] > reached:
        raise ConfigError(
            f"max_position_embeddings={config['max_position_embeddings']} exceeds {reached:g}, the product of factor and"
            " original_max_position_embeddings to which vLLM computes YaRN's rotary embeddings; lower it, or raise factor"
        )
    return tuple(scaling.items())


def window_sizes(config: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Return the windows of all layers; empty if none of them is shorter than the longest sequence.

    Layers with rotary embeddings of their own keep a window of any size.
    """
    windows, window = family.windows_of(config), config.get("sliding_window")
    if windows and (type(window) is not int or window < 1):
        raise ConfigError(
            f"sliding_window={shown(window)} must be a positive integer, or null if no layer has a window; restore the"
            " model's original config.json"
        )
    own = family.window_theta_of(config) is not None
    longest = math.inf if own else config["max_position_embeddings"]
    windows = tuple(size if size < longest else 0 for size in windows)
    return windows if any(windows) else ()
