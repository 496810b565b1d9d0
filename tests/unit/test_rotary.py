"""Rotary embeddings: angles and attention factors compared with those of transformers and of vLLM."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from hybridengine.backends.megatron.rotary import attention_factor, inverse_frequencies, softmax_scale
from hybridengine.errors import ConfigError
from hybridengine.models.shapes import ModelShape
from tests.unit.model_configs import plain

ORIGINAL = 256
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": YARN,
    "yarn with other bounds": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn with both scales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn with one scale": YARN | {"mscale": 0.7},
    "yarn with a factor of its own": YARN | {"attention_factor": 0.9},
}


def config_of(scaling: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return plain(rope_theta=5e5, rope_scaling=scaling, head_dim=128, max_position_embeddings=2048, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_those_of_transformers_and_vllm(kind: str) -> None:
    config = transformers.LlamaConfig.from_dict(config_of(KINDS[kind]))
    shape = ModelShape.from_hf_config(config_of(KINDS[kind]))
    positions = torch.tensor(
        [[0, 1, ORIGINAL - 1, ORIGINAL, 5 * ORIGINAL + 3, 2047]]
    )  # the last ones were scaled to
    angles = positions[0, :, None].float() * inverse_frequencies(shape)
    cos, sin = (table * attention_factor(shape) for table in (angles.cos(), angles.sin()))

    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    with set_current_vllm_config(VllmConfig()):
        settings = dict(config.rope_parameters or {})
        engine = get_rope(128, 2048, rope_parameters=settings, dtype=torch.float32)

    for mine, expected in zip((cos, sin), theirs, strict=True):
        torch.testing.assert_close(torch.cat([mine, mine], -1), expected[0], atol=2e-4, rtol=0)
    cached = engine.cos_sin_cache[positions[0]]
    torch.testing.assert_close(torch.cat([cos, sin], -1), cached, atol=2e-4, rtol=0)


def test_the_attention_factor_is_part_of_the_scale_of_scores() -> None:
    factor = 0.1 * math.log(8.0) + 1.0  # of queries, and of keys
    assert softmax_scale(ModelShape.from_hf_config(config_of(YARN))) == pytest.approx(
        factor**2 / math.sqrt(128)
    )
    assert softmax_scale(ModelShape.from_hf_config(config_of(KINDS["linear"]))) == pytest.approx(128**-0.5)


REFUSED = {
    "yarn without its numbers": (
        {"rope_type": "yarn", "factor": 2.0},
        {},
        "^rope_type='yarn' needs the numbers original_max_position_embeddings; restore",
    ),
    "yarn beyond vLLM's table": (
        YARN,
        {"max_position_embeddings": 4096},
        "^max_position_embeddings=4096 exceeds 2048, the product of factor and original_max_position_embeddings",
    ),
    "bounds between frequencies": (
        YARN | {"truncate": False},
        {},
        "^truncate=false of rope_type='yarn' is not",
    ),
    "another kind": (
        {"rope_type": "dynamic", "factor": 2.0},
        {},
        "^rope_type='dynamic' is not supported; use 'default' or 'linear' or 'llama3' or 'yarn'$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_scalings_are_refused(case: str) -> None:
    scaling, changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_hf_config(config_of(scaling) | changes)


def test_a_part_of_each_head_is_rotary() -> None:
    """GLM-4: dims 0 to 63 of 128 in neighbouring pairs, of which all libraries have one angle each."""
    contents = plain(
        architectures=["Glm4ForCausalLM"], rope_theta=5e5, head_dim=128, max_position_embeddings=2048
    )
    config, shape = transformers.Glm4Config.from_dict(contents), ModelShape.from_hf_config(contents)
    positions = torch.tensor([[0, 1, 1000, 2047]])
    angles = positions[0, :, None].float() * inverse_frequencies(shape)
    assert angles.shape == (4, 32)

    theirs = Glm4RotaryEmbedding(config)(torch.zeros(1), positions)
    with set_current_vllm_config(VllmConfig()):
        settings = dict(config.rope_parameters or {})
        engine = get_rope(128, 2048, is_neox_style=False, rope_parameters=settings, dtype=torch.float32)

    tables = angles.cos(), angles.sin()
    for mine, expected in zip(tables, theirs, strict=True):
        torch.testing.assert_close(torch.cat([mine, mine], -1), expected[0], atol=2e-4, rtol=0)
    cached = engine.cos_sin_cache[positions[0]]
    torch.testing.assert_close(torch.cat(tables, -1), cached, atol=2e-4, rtol=0)
