"""Gemma 3 (text): four zero-centred norms in a layer, and windows in most layers, with rotary embeddings of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridengine.families.family import DecoderSizes, Family

_KINDS = {"full_attention", "sliding_attention"}


class Gemma3(Family):
    """Gemma 3, whose `rope_parameters` are nested by kind of layer in transformers 5 and flat in published files."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        nested = config.get("rope_parameters") or {}
        parts = {kind: nested[kind] for kind in _KINDS if isinstance(nested.get(kind), dict)}
        flat: dict[str, Any] = {}
        if parts:
            flat["rope_parameters"] = {"rope_theta": 1e6} | parts.get("full_attention", {})
            local = parts.get("sliding_attention", {})
            flat["rope_local_base_freq"] = local.get("rope_theta", 1e4)
            flat["local_rope_type"] = local.get("rope_type", "default")
        return super().completed(config) | flat

    def layer_kinds(self, config: Mapping[str, Any]) -> list[str]:
        every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        kinds = [
            f"{'sliding' if (layer + 1) % every else 'full'}_attention"
            for layer in range(config["num_hidden_layers"])
        ]
        return [str(kind) for kind in config.get("layer_types") or kinds]

    def windows_of(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        kinds = self.layer_kinds(config)
        return tuple(config["sliding_window"] if kind == "sliding_attention" else 0 for kind in kinds)

    def window_theta_of(self, config: Mapping[str, Any]) -> float | None:
        return config["rope_local_base_freq"]  # type: ignore[no-any-return]

    def query_scalar_of(self, config: Mapping[str, Any]) -> float | None:
        return config["query_pre_attn_scalar"]  # type: ignore[no-any-return]

    def refusals(self, config: Mapping[str, Any]) -> Iterator[str]:
        yield from super().refusals(config)
        if config["hidden_activation"] != "gelu_pytorch_tanh":
            yield f"hidden_activation={config['hidden_activation']!r} is not supported; it must be 'gelu_pytorch_tanh'"
        for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
            if config.get(key):
                yield f"{key}={config[key]} is not supported; use a model without it"
        if config.get("local_rope_type", "default") != "default":
            yield (
                f"rope_type={config['local_rope_type']!r} of sliding_attention is not supported; it must be 'default'"
            )

    def window_refusals(self, config: Mapping[str, Any]) -> Iterator[str]:
        kinds = self.layer_kinds(config)
        if len(kinds) != config["num_hidden_layers"] or set(kinds) - _KINDS:
            yield (
                f"layer_types={kinds} must name {' or '.join(sorted(_KINDS))} for each of the"
                f" {config['num_hidden_layers']} layers; restore the model's original config.json"
            )

    def megatron_config(self, sizes: DecoderSizes) -> dict[str, Any]:
        return super().megatron_config(sizes) | {
            "activation_func": "gelu_tanh",
            "layernorm_zero_centered_gamma": True,
        }


GEMMA3 = Gemma3(
    name="gemma3_text",
    hf_prefix="Gemma3Text",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    number_keys=("query_pre_attn_scalar",),
    rope_types=("default", "linear"),
    qk_norm=True,
    mlp_norm="pre_feedforward_layernorm.weight",
    post_norms=("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"),
    scaled_embedding=True,
)
