"""Configuration files of models: both styles of rotary settings, and refusals with value and remedy."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import transformers

from hybridengine.errors import CheckpointError, ConfigError
from hybridengine.families.deepseek_v3 import DEEPSEEK_V3
from hybridengine.families.registry import ARCHITECTURES
from hybridengine.models.shapes import ModelShape
from tests.unit.model_configs import IMAGE_TOKENS, SIZES, plain, vision_entries

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK = {
    **DEEPSEEK_V3.built_config,
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 8,
    "num_key_value_heads": 6,
}
ROTARY = {
    "nested": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, ()),
    "flat": ({"rope_theta": 1e6}, 1e6, ()),
    "flat, no scaling": ({"rope_theta": 1e6, "rope_scaling": None}, 1e6, ()),
    "absent": ({}, 1e4, ()),
    "nested llama3": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        5e5,
        tuple(LLAMA3.items()),
    ),
    "both styles alike": (
        {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            "rope_scaling": {"type": "llama3", **LLAMA3},
            "rope_theta": 5e5,
        },
        5e5,
        tuple(LLAMA3.items()),
    ),
    "flat llama3": (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        5e5,
        tuple(LLAMA3.items()),
    ),
    "flat llama3, old key": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        5e5,
        tuple(LLAMA3.items()),
    ),
}


@pytest.mark.parametrize("form", list(ROTARY))
def test_rotary_settings_of_both_config_styles(form: str) -> None:
    contents, theta, scaling = ROTARY[form]
    shape = ModelShape.from_hf_config(plain(**contents))
    assert shape.rope_theta == theta
    assert shape.rope_scaling == scaling
    transformers = importlib.import_module("transformers")
    theirs = transformers.LlamaConfig.from_dict(plain(**contents)).rope_parameters
    assert theirs["rope_theta"] == theta
    assert theirs["rope_type"] == ("llama3" if scaling else "default")
    assert {key: theirs[key] for key in LLAMA3 if key in theirs} == dict(scaling)


BAD = {
    "no architecture": (
        {"architectures": None},
        r"^architectures=\[\] is not supported; use one of Deepseek.*Gemma3.*Qwen3",
    ),
    "another architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        r"^architectures=\['GPT2LMHeadModel'\] is not",
    ),
    "missing size": (
        {"vocab_size": None},
        r"^vocab_size=null \(at most 16777216\) must be positive integers \(null: missing\); restore",
    ),
    "all bad sizes": (
        {"hidden_size": 0, "num_hidden_layers": "3", "head_dim": -1, "num_key_value_heads": 2.0},
        r'^num_hidden_layers="3" .*, hidden_size=0 .*, num_key_value_heads=2.0 .*, head_dim=-1 \(at most 16777216\) must',
    ),
    "a truth value for a size": (
        {"num_hidden_layers": True},
        r"^num_hidden_layers=true \(at most 1000\) must be positive integers",
    ),
    "kv heads": (
        {"num_key_value_heads": 4},
        "^num_key_value_heads=4 does not divide num_attention_heads=6; restore",
    ),
    "heads": (
        {"head_dim": None, "hidden_size": 50},
        "^num_attention_heads=6 does not divide hidden_size=50 and head_dim is not given; restore",
    ),
    "sliding window": (
        {"use_sliding_window": True},
        "^use_sliding_window=true is not supported; use a model with full",
    ),
    "sliding layers": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        r"^layer_types=\['sliding_attention'\] are not supported",
    ),
    "quantised": (
        {"quantization_config": {"quant_method": "fp8"}},
        "^quantization_config is not supported; use",
    ),
    "attention bias": ({"attention_bias": True}, "^attention_bias=true puts a bias on the output projection"),
    "mlp bias": ({"mlp_bias": True}, "^mlp_bias=true is not supported"),
    "activation": ({"hidden_act": "gelu"}, "^hidden_act='gelu' is not supported; it must be 'silu'"),
    "rotary kind": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "^rope_type='dynamic' is not supported; use 'def",
    ),
    "two styles that differ": (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rope_scaling": {"type": "llama3", **LLAMA3},
        },
        "^rope_parameters and rope_scaling say different things; restore",
    ),
    "two values of theta": (
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "default", "rope_theta": 11}},
        "^rope_parameters and rope_scaling say different things; restore",
    ),
    "nested partial rotary": (
        {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "^partial_rotary_factor=0.5 is not supported for llama; it must be 1.0",
    ),
    "rotary by kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 3.0}}},
        r'^rotary settings by kind of layer \("full_attention"\) are not supported',
    ),
    "half llama3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": None}},
        "^rope_type='llama3' needs the numbers low_freq_factor, high_freq_factor, original_max_position_embeddings;",
    ),
    "text for a number": ({"rope_theta": "x"}, '^rope_theta="x" must be a positive number; restore'),
    "nested text": ({"rope_parameters": {"rope_theta": "x"}}, '^rope_theta="x" must be a positive number;'),
    "negative epsilon": ({"rms_norm_eps": -1}, "^rms_norm_eps=-1 must be a positive number; restore"),
    "epsilon that is not a number": (
        {"rms_norm_eps": math.nan},
        "^rms_norm_eps=NaN must be a positive number;",
    ),
    "text epsilon": ({"rms_norm_eps": "1e-5"}, '^rms_norm_eps="1e-5" must be a positive number;'),
    "infinite scaling": (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": math.inf}},
        "^factor=Infinity must be a positive number;",
    ),
    "scaling that is not an object": ({"rope_scaling": "x"}, '^rope_scaling="x" must be an object; restore'),
    "labels that are no object": ({"id2label": 5}, "^id2label=5 must be an object; restore"),
    "architecture that is not a list": ({"architectures": "Llama"}, '^architectures="Llama" must be a list;'),
    "text for a truth value": (
        {"tie_word_embeddings": "no"},
        '^tie_word_embeddings="no" must be true or false; restore',
    ),
    "too many layers": (
        {"num_hidden_layers": 10_000_000},
        r"^num_hidden_layers=10000000 \(at most 1000\) must",
    ),
    "too many heads": (
        {"num_attention_heads": 4096},
        r"^num_attention_heads=4096 \(at most 1024\) must",
    ),
    "a size of many digits": (
        {"hidden_size": int("9" * 4000)},
        r"^hidden_size=9{57}\.\.\. \(at most 16777216\) must",
    ),
    "too many parameters": (
        {"hidden_size": 2**24, "intermediate_size": 2**24},
        "^the sizes of config.json make [0-9]+ parameters, which must be at most 10000000000000; restore",
    ),
    "experts": (
        {"num_experts": 128},
        "^num_experts=128: llama has no experts; use another model, or restore",
    ),
    "local experts": ({"num_local_experts": 8}, "^num_local_experts=8: llama has no experts"),
    "another model type": (
        {"model_type": "mixtral"},
        r"^model_type=\"mixtral\" is not the 'llama' of architectures=\['LlamaForCausalLM'\]; use a model of a",
    ),
    "a number of experts that is a text": (
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": "8"},
        r'^num_experts="8" \(at most 16384\) must be positive integers',
    ),
    "more active experts than there are": (
        {"architectures": ["MixtralForCausalLM"], "sliding_window": None, "num_experts_per_tok": 9},
        "^num_experts_per_tok=9 must be between 1 and 8, the number of experts; restore",
    ),
    "a text for a flag": (
        {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": "false"},
        '^norm_topk_prob="false" must be true or false',
    ),
    "windows by layer of a Mistral": (
        {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": 4,
            "layer_types": ["full_attention", "full_attention"],
        },
        "^layer_types with sliding_window=4 are not supported; leave layer_types out if all layers have the window",
    ),
    "one active expert, normalized": (
        {"architectures": ["MixtralForCausalLM"], "sliding_window": None, "num_experts_per_tok": 1},
        "^num_experts_per_tok=1 with weights that add up to 1 is not supported, because Megatron-core weights a",
    ),
    "one active expert of DeepSeek-V3": (
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
        "^num_experts_per_tok=1 with weights that add up to 1 is not supported, because Megatron-core weights a",
    ),
    "layers without experts": (
        {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]},
        r"^decoder_sparse_step=1 with mlp_only_layers=\[0\] is not supported; use a model with experts",
    ),
    "a window that is not a number": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": "4k"},
        '^sliding_window="4k" must be a positive integer, or null if no layer has a window; restore',
    ),
    "windows in some layers": (
        {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "max_window_layers": 2},
        r"^layer_types=\['full_attention', 'sliding_attention'\] \(layers before max_window_layers are full\) are not",
    ),
    "layers with windows that are off": (
        {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 3},
        r"^layer_types=\['sliding_attention'\] without use_sliding_window; restore",
    ),
    "Gemma's layers": (
        {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["sliding_attention"]},
        r"^layer_types=\['sliding_attention'\] must name full_attention or sliding_attention for each of the 3 layers",
    ),
    "Gemma without a window": (
        {"architectures": ["Gemma3ForCausalLM"], "sliding_window": None},
        "^sliding_window=null must be a positive integer, or null if no layer has a window; restore",
    ),
    "Gemma's softcapping": (
        {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
        "^final_logit_softcapping=30.0 is not supported",
    ),
    "Gemma's activation": (
        {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"},
        "^hidden_activation='gelu' is not supported; it must be 'gelu_pytorch_tanh'",
    ),
    "Gemma's local rotary embeddings": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}
            },
        },
        "^rope_type='linear' of sliding_attention is not supported; it must be 'default'",
    ),
    "Phi-3's long rotary embeddings": (
        {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}},
        "^rope_type='longrope' is not supported; use 'default'$",
    ),
    "DeepSeek-V3's way to score experts": (
        {**DEEPSEEK, "scoring_func": None},
        "^scoring_func=None is not supported; it must be 'sigmoid'",
    ),
    "DeepSeek-V3 with queries of no short vector": (
        {**DEEPSEEK, "q_lora_rank": None},
        "^q_lora_rank=null .* must be positive integers",
    ),
    "DeepSeek-V3 without a short vector of queries": (
        {**DEEPSEEK, "q_lora_rank": 0},
        r"^q_lora_rank=0 .* must be positive integers",
    ),
    "DeepSeek-V3's key heads": (
        {**DEEPSEEK, "num_key_value_heads": 2},
        "^num_key_value_heads=2 must be num_attention_heads=6 with latent attention",
    ),
    "DeepSeek-V3's groups": (
        {**DEEPSEEK, "num_experts_per_tok": 6},
        "^num_experts_per_tok=6 must be twice topk_group=1, because Megatron-core",
    ),
    "DeepSeek-V3's number of groups": (
        {**DEEPSEEK, "n_group": 3},
        "^n_group=3 must divide n_routed_experts=8, and topk_group=1 be between 1 and it",
    ),
    "DeepSeek-V3 with head_dim": (
        {**DEEPSEEK, "head_dim": 96},
        "^head_dim=96 must be qk_rope_head_dim=64, as transformers uses it; remove it$",
    ),
    "DeepSeek-V3's tied head": (
        {**DEEPSEEK, "tie_word_embeddings": True},
        "^tie_word_embeddings=true is not supported by vLLM",
    ),
    "DeepSeek-V3 in FP8, as it is published": (
        {**DEEPSEEK, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "^quantization_config is not supported; use the model's unquantised weights$",
    ),
    "YaRN without the factor of all dims": (
        {**DEEPSEEK, "rope_scaling": {"type": "yarn", "factor": 40.0, "mscale": 1.0}},
        "^rope_type='yarn' needs the numbers original_max_position_embeddings, .*mscale_all_dim",
    ),
    "YaRN with a factor of attention": (
        {**DEEPSEEK, "rope_scaling": {**YARN, "attention_factor": 1.0}},
        "^attention_factor=1.0 of rope_type='yarn' is not supported; remove it$",
    ),
    "partial rotary": (
        {"partial_rotary_factor": 0.5},
        "^partial_rotary_factor=0.5 is not supported for llama; it must be 1.0",
    ),
    "GLM-4's rotary dims": (
        {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 0.3, "head_dim": 32},
        "^partial_rotary_factor=0.3 of head_dim=32 must be between 0 and 1 and give an even number of dims; restore",
    ),
    "GLM-4's rotary share": (
        {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": "0.5"},
        '^partial_rotary_factor="0.5" of head_dim=16 must be between 0 and 1',
    ),
    "Granite's factors": (
        {"architectures": ["GraniteForCausalLM"], "logits_scaling": 0},
        "^logits_scaling=0 must be a positive number; restore",
    ),
    "Granite's layers": (
        {"architectures": ["GraniteForCausalLM"], "layer_types": ["full_attention"] * 3},
        "^layer_types is not supported for granite; use a model with the same attention in all layers$",
    ),
    "Granite with a score head": (
        {"architectures": ["GraniteForSequenceClassification"]},
        r"^architectures=\['GraniteForSequenceClassification'\] is not supported; use one of ",
    ),
    "GLM-4 with YaRN": (
        {
            "architectures": ["Glm4ForCausalLM"],
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        "^rope_type='yarn' is not supported; use 'default'$",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_configurations_name_the_value_and_the_remedy(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_hf_config(plain(**changes))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_null_counts_as_left_out(family: str) -> None:
    """Except for num_key_value_heads: transformers reads null as one per query head, a missing key as its default."""
    config = plain(architectures=[f"{family}ForCausalLM"], num_attention_heads=64, hidden_size=64)
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"):
        config.pop(key, None)
    left_out = ModelShape.from_hf_config(config)
    nulls = ("rope_theta", "rms_norm_eps", "hidden_act", "partial_rotary_factor", "head_dim", "layer_types")
    nested = {
        "rope_scaling": {"rope_type": None, "type": None, "rope_theta": None, "partial_rotary_factor": None}
    }
    assert ModelShape.from_hf_config(config | dict.fromkeys(nulls) | nested) == left_out
    heads = ModelShape.from_hf_config(config | {"num_key_value_heads": None}).num_kv_heads
    reference = getattr(transformers, f"{family}Config")(num_attention_heads=64, num_key_value_heads=None)
    assert heads == reference.num_key_value_heads == 64


def test_what_a_dense_model_may_say_of_experts_and_embeddings() -> None:
    shape = ModelShape.from_hf_config(plain(num_experts=0, model_type="llama", tie_word_embeddings=None))
    assert shape == ModelShape.from_hf_config(plain())
    assert not shape.tied_embeddings
    assert ModelShape.from_hf_config(plain(tie_word_embeddings=True)).tied_embeddings


def test_every_architecture_is_accepted() -> None:
    for name, family in ARCHITECTURES.items():
        window = 32 if family.name == "gemma3_text" else None
        heads = {"num_key_value_heads": 6} if family.latent_keys else {}
        if family.has_vision:
            heads = vision_entries(SIZES["hidden_size"], SIZES["num_attention_heads"])
            heads |= IMAGE_TOKENS
        own = {"architectures": [name], "sliding_window": window, **family.built_config, **heads}
        shape = ModelShape.from_hf_config(plain(**own))
        assert shape.family == family.name
        assert bool(shape.num_labels) == name.endswith("ForSequenceClassification")


def test_shapes_are_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    expected = ModelShape.from_hf_config(plain())
    (tmp_path / "config.json").write_text(json.dumps(plain()))
    assert ModelShape.from_folder(tmp_path) == expected
    assert ModelShape.from_folder(str(tmp_path / "config.json")) == expected


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "config.json does not exist; name a Hugging Face checkpoint folder$"),
        (b'{"hidden_size": 4', "config.json is not valid JSON .*; restore the model's original file$"),
        (b"\xff\xfe", "config.json is not UTF-8 text .*; restore the model's original file$"),
        (b"[" * 100_000, r"config.json is not valid JSON \(nested too deeply\); restore"),
        (b"9" * 5000, r"config.json is not valid JSON \(a number has thousands of digits\); restore"),
        (b"", "config.json is a folder, not a regular file; restore the model's original file$"),
        (b"[1, 2]", "config.json holds list, not an object; restore the model's original file$"),
    ],
)
def test_unreadable_configuration_files(tmp_path: Path, contents: bytes | None, message: str) -> None:
    file = tmp_path / "config.json"
    if contents is not None:
        file.write_bytes(contents) if contents else file.mkdir()
    with pytest.raises(CheckpointError, match=message):
        ModelShape.from_folder(tmp_path)
