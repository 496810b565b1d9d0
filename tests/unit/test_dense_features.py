"""Windows, rotary embeddings and factors of dense families, read from both styles of config.json."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from hybridengine.backends.megatron.rotary import softmax_scale
from hybridengine.errors import ConfigError
from hybridengine.families.sizes import Multipliers
from hybridengine.models.shapes import ModelShape
from tests.unit.model_configs import plain

WINDOWS = {
    "Mistral, by default": ("Mistral", {"max_position_embeddings": 8192}, (4096,) * 3),
    "Mistral, null": ("Mistral", {"sliding_window": None}, ()),
    "Mistral, longer than any row": ("Mistral", {"sliding_window": 96}, ()),
    "Phi-3 mini": ("Phi3", {"sliding_window": 47, "head_dim": None}, (47,) * 3),
    "Qwen2, off": ("Qwen2", {"sliding_window": 32, "max_window_layers": 0}, ()),
    "Qwen2, on": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0},
        (32,) * 3,
    ),
    "Qwen3, on after the last layer": ("Qwen3", {"use_sliding_window": True, "sliding_window": 32}, ()),
    "Gemma": ("Gemma3", {"sliding_window": 32, "sliding_window_pattern": 2}, (32, 0, 32)),
    "Gemma, longer than any row": ("Gemma3", {}, (4096,) * 3),
}


@pytest.mark.parametrize("case", list(WINDOWS))
def test_windows_of_layers(case: str) -> None:
    name, changes, windows = WINDOWS[case]
    contents = plain(architectures=[f"{name}ForCausalLM"]) | changes
    shape = ModelShape.from_hf_config(contents)
    assert shape.windows == windows
    assert [shape.window(layer) for layer in range(3)] == list(windows or (0, 0, 0))
    refused = ["c=2 divides rows"] if windows else []
    assert [problem[:16] for problem in shape.cp_problems(2)] == refused
    assert shape.cp_problems(1) == []


@pytest.mark.parametrize("nested", [False, True])
def test_rotary_settings_of_gemma_in_both_styles(nested: bool) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    contents = plain(architectures=["Gemma3ForCausalLM"], query_pre_attn_scalar=168)
    contents |= (
        {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": linear}
        if not nested
        else {
            "rope_parameters": {
                "full_attention": {"rope_theta": 2e6, **linear},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            }
        }
    )
    shape = ModelShape.from_hf_config(contents)
    assert (shape.rope_type, shape.rope_theta, shape.window_rope_theta) == ("linear", 2e6, 3e4)
    assert (shape.rope_scaling, shape.query_scalar) == ((("factor", 8.0),), 168)
    assert shape.tied_embeddings
    theirs: Any = transformers.Gemma3TextConfig.from_dict(contents).rope_parameters
    assert theirs["full_attention"] == {"rope_theta": 2e6, **linear}
    assert theirs["sliding_attention"]["rope_theta"] == 3e4


@pytest.mark.parametrize("nested", [False, True])
def test_attention_of_glm4_in_both_styles(nested: bool) -> None:
    """Without the keys, half of a head is rotary, and q, k and v have a bias."""
    contents = plain(architectures=["Glm4ForCausalLM"], head_dim=64, attention_bias=False)
    quarter = {"rope_theta": 2e4, "partial_rotary_factor": 0.25}
    contents |= {"rope_parameters": quarter} if nested else quarter
    shape = ModelShape.from_hf_config(contents)
    assert (shape.rotary_dim, shape.rope_theta, shape.qkv_bias) == (16, 2e4, False)
    theirs: Any = transformers.Glm4Config.from_dict(contents).rope_parameters
    assert (theirs["partial_rotary_factor"], theirs["rope_theta"]) == (0.25, 2e4)
    usual = ModelShape.from_hf_config(plain(architectures=["Glm4ForCausalLM"], head_dim=64))
    assert (usual.rotary_dim, usual.qkv_bias) == (32, True)
    everywhere = plain(architectures=["Glm4ForCausalLM"], partial_rotary_factor=1.0)
    assert ModelShape.from_hf_config(everywhere).rotary_dim is None


def test_factors_of_granite() -> None:
    factors = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 16}
    contents = plain(architectures=["GraniteForCausalLM"], attention_multiplier=0.0078125, **factors)
    shape = ModelShape.from_hf_config(contents)
    assert shape.multipliers == Multipliers(12.0, 0.22, 1 / 16)
    assert shape.query_scalar == 128**2
    assert softmax_scale(shape) == 1 / 128
    with pytest.raises(
        ConfigError, match=r"^granite has no model with a score head in transformers, as critics"
    ):
        shape.with_score_head()
