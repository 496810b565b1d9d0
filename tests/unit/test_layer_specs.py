"""Specs of layers with Transformer Engine, which is not installed: a function stands in for its attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear

from hybridengine.backends.megatron import compat
from hybridengine.backends.megatron.attention import LayerAttention, normed
from hybridengine.families.family import NameSet
from hybridengine.models.presets import resolve_model


def attention(**named: Any) -> Any:
    return named["config"]


def local_spec(**_: Any) -> Any:
    spec: Any = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = attention
    return spec


def test_windows_and_norms_follow_the_number_of_a_layer_in_the_model() -> None:
    """Layer 5 of Gemma 3 attends to all positions, in whichever stage it is."""
    config = SimpleNamespace(window_size=None, window_attn_skip_freq=[1, 0])
    with mock.patch.object(compat, "get_gpt_layer_with_transformer_engine_spec", local_spec):
        stage: Any = compat.stage_spec(
            NameSet.TRANSFORMER_ENGINE, resolve_model("gemma3-1b"), range(4, 7)
        ).layer_specs
    found = []
    for layer in stage:
        part, mlp = layer.submodules.self_attention, compat._mlp_parts(layer.submodules)
        built = part.submodules.core_attention(config=config, layer_number=1)
        found.append((built.window_size, part.params["rotary"]))
        assert part.module is LayerAttention
        assert part.submodules.linear_proj is mlp.linear_fc2 is normed(RowParallelLinear, TENorm)
        assert built is config or built.window_attn_skip_freq is None
    assert found == [((511, 0), 1), (None, 0), ((511, 0), 1)]
    assert config.window_attn_skip_freq == [1, 0]
