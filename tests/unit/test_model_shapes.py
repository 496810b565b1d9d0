"""Model shapes against transformers' own models, built without memory on the meta device."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hybridengine.errors import CheckpointError, ConfigError
from hybridengine.model_shapes import ARCHITECTURES, ModelShape

FAMILIES = ("Llama", "Qwen2", "Qwen3")

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
}
"""Sizes that are all different; head_dim is not hidden_size / num_attention_heads, where the family can say so."""


def hf_config(family: str, task: str = "CausalLM", **changes: Any) -> Any:
    """A transformers configuration of `family`, with its architecture set."""
    transformers = importlib.import_module("transformers")
    sizes = SIZES | changes
    if family == "Qwen2":
        sizes.pop("head_dim", None)  # Qwen2 has none: it is hidden_size / num_attention_heads
    config = getattr(transformers, f"{family}Config")(**sizes)
    config.architectures = [f"{family}For{task}"]
    return config


def hf_tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers saves for a model: tied weights are saved once."""
    import torch
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    tied = set(model.all_tied_weights_keys)
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in tied}


def saved(config: Any) -> dict[str, Any]:
    """What transformers writes to config.json."""
    return json.loads(config.to_json_string(use_diff=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_equal_those_of_transformers(family: str, tied: bool) -> None:
    for heads, kv_heads in ((6, 2), (6, 6), (6, 1), (4, 2)):
        config = hf_config(
            family, num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied
        )
        shape = ModelShape.from_hf_config(saved(config))
        assert shape.tensors == hf_tensors(config)
        assert shape.tied_embeddings is tied
        assert ("lm_head.weight" in shape.tensors) is not tied


@pytest.mark.parametrize(("family", "num_labels"), list(product(FAMILIES, (1, 2, 5))))
def test_sequence_classification_tensors_equal_those_of_transformers(family: str, num_labels: int) -> None:
    for tied in (False, True):  # a classifier has no head to tie
        config = hf_config(family, "SequenceClassification", num_labels=num_labels, tie_word_embeddings=tied)
        shape = ModelShape.from_hf_config(saved(config))
        assert shape.num_labels == num_labels
        assert shape.tied_embeddings is False
        assert shape.tensors == hf_tensors(config)
        assert shape.tensors["score.weight"] == (num_labels, 48)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_counts_equal_those_of_transformers(family: str) -> None:
    import torch
    import transformers

    for tied in (False, True):
        config = hf_config(family, tie_word_embeddings=tied)
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
        expected = sum(parameter.numel() for parameter in model.parameters())  # a shared one counts once
        shape = ModelShape.from_hf_config(saved(config))
        assert shape.num_parameters == expected
        assert shape.weight_bytes("float32") == 4 * expected
        assert shape.weight_bytes("bfloat16") == shape.weight_bytes("float16") == 2 * expected


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_of_a_saved_configuration(family: str) -> None:
    shape = ModelShape.from_hf_config(saved(hf_config(family)))
    assert (shape.family, shape.num_layers, shape.hidden_size) == (family.lower(), 3, 48)
    assert (shape.ffn_hidden_size, shape.vocab_size, shape.max_positions) == (80, 131, 96)
    assert (shape.num_heads, shape.num_kv_heads) == (6, 2)
    assert shape.head_dim == (8 if family == "Qwen2" else 16)
    assert (shape.q_size, shape.kv_size) == (6 * shape.head_dim, 2 * shape.head_dim)
    assert shape.norm_eps == 1e-5
    assert (shape.qkv_bias, shape.qk_norm) == (family == "Qwen2", family == "Qwen3")
    assert shape.num_labels == 0


@pytest.mark.parametrize(
    ("family", "absent"),
    [
        (family, key)
        for family in FAMILIES
        for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
    ],
)
def test_absent_keys_mean_what_transformers_takes_them_for(family: str, absent: str) -> None:
    changes: dict[str, Any] = {"num_attention_heads": 32, "hidden_size": 192, "num_key_value_heads": 8}
    contents = saved(hf_config(family, **changes))
    contents.pop(absent, None)
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{family}Config").from_dict(contents)
    shape = ModelShape.from_hf_config(contents)
    assert shape.tensors == hf_tensors(config)
    assert shape.max_positions == config.max_position_embeddings
    assert shape.norm_eps == config.rms_norm_eps


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
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


def plain(**changes: Any) -> dict[str, Any]:
    """Contents of a Llama config.json without rotary settings."""
    return {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **SIZES, **changes}


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
        r"^architectures=\[\] is not supported; use one of Llama.*Qwen3",
    ),
    "another architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        r"^architectures=\['GPT2LMHeadModel'\] is not",
    ),
    "missing size": (
        {"vocab_size": None},
        "^config.json of LlamaForCausalLM: vocab_size must be present and positive",
    ),
    "all bad sizes": (
        {"hidden_size": 0, "num_hidden_layers": "3", "head_dim": -1, "num_key_value_heads": 2.0},
        ": num_hidden_layers, hidden_size, num_key_value_heads, head_dim must be present and positive integers;",
    ),
    "a truth value for a size": (
        {"num_hidden_layers": True},
        ": num_hidden_layers must be present and positive",
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
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        "^rope_type='yarn' is not supported; use 'def",
    ),
    "half llama3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": None}},
        "^rope_type='llama3' needs the numbers low_freq_factor, high_freq_factor, original_max_position_embeddings;",
    ),
    "text for a number": ({"rope_theta": "x"}, '^rope_theta="x" must be a positive number; restore'),
    "null for a number": ({"rope_theta": None}, "^rope_theta=null must be a positive number; restore"),
    "nested text": ({"rope_parameters": {"rope_theta": "x"}}, '^rope_theta="x" must be a positive number;'),
    "negative epsilon": ({"rms_norm_eps": -1}, "^rms_norm_eps=-1 must be a positive number; restore"),
    "epsilon that is no number": ({"rms_norm_eps": math.nan}, "^rms_norm_eps=NaN must be a positive number;"),
    "text epsilon": ({"rms_norm_eps": "1e-5"}, '^rms_norm_eps="1e-5" must be a positive number;'),
    "infinite scaling": (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": math.inf}},
        "^factor=Infinity must be a positive number;",
    ),
    "scaling that is no object": ({"rope_scaling": "x"}, '^rope_scaling="x" must be an object; restore'),
    "labels that are no object": ({"id2label": 5}, "^id2label=5 must be an object; restore"),
    "architecture that is no list": ({"architectures": "Llama"}, '^architectures="Llama" must be a list;'),
    "text for a truth value": (
        {"tie_word_embeddings": "no"},
        '^tie_word_embeddings="no" must be true or false; restore',
    ),
    "too many layers": (
        {"num_hidden_layers": 10_000_000},
        "^num_hidden_layers=10000000 must be at most 1000; restore",
    ),
    "too many heads": (
        {"num_attention_heads": 4096},
        "^num_attention_heads=4096 must be at most 1024; restore",
    ),
    "a size of many digits": (
        {"hidden_size": int("9" * 4000)},
        r"^hidden_size=9{57}\.\.\. must be at most 16777216; restore",
    ),
    "too many parameters": (
        {"hidden_size": 2**24, "intermediate_size": 2**24},
        "^the sizes of config.json make [0-9]+ parameters, which must be at most 10000000000000; restore",
    ),
    "experts": (
        {"num_experts": 128},
        "^num_experts=128: mixture-of-experts is not supported yet; use a dense",
    ),
    "local experts": ({"num_local_experts": 8}, "^num_local_experts=8: mixture-of-experts is not supported"),
    "another model type": (
        {"model_type": "mixtral"},
        r"^model_type=\"mixtral\" is not the 'llama' of architectures=\['LlamaForCausalLM'\]; other models,"
        " mixture-of-experts among them, are not supported yet; use",
    ),
    "partial rotary": (
        {"partial_rotary_factor": 0.5},
        "^partial_rotary_factor is not supported; it must be 1.0",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_configurations_name_the_value_and_the_remedy(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_hf_config(plain(**changes))


def test_what_a_dense_model_may_say_of_experts_and_embeddings() -> None:
    shape = ModelShape.from_hf_config(plain(num_experts=0, model_type="llama", tie_word_embeddings=None))
    assert shape == ModelShape.from_hf_config(plain())
    assert not shape.tied_embeddings
    assert ModelShape.from_hf_config(plain(tie_word_embeddings=True)).tied_embeddings


def test_every_architecture_is_accepted() -> None:
    for name, family in ARCHITECTURES.items():
        shape = ModelShape.from_hf_config(plain(architectures=[name]))
        assert shape.family == family
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
        (b"\xff\xfe", "config.json is not valid JSON .*; restore the model's original file$"),
        (b"[" * 100_000, r"config.json is not valid JSON \(nested too deeply\); restore"),
        (b"9" * 5000, r"config.json is not valid JSON \(a number has thousands of digits\); restore"),
        (b"[1, 2]", "config.json holds list, not an object; restore the model's original file$"),
    ],
)
def test_unreadable_configuration_files(tmp_path: Path, contents: bytes | None, message: str) -> None:
    if contents is not None:
        (tmp_path / "config.json").write_bytes(contents)
    with pytest.raises(CheckpointError, match=message):
        ModelShape.from_folder(tmp_path)


def test_layers_are_split_into_consecutive_stages() -> None:
    for num_layers in range(1, 20):
        shape = ModelShape.from_hf_config(plain(num_hidden_layers=num_layers))
        for pp_size in range(1, num_layers + 1):
            stages = shape.split_layers(pp_size)
            assert [layer for stage in stages for layer in stage] == list(range(num_layers))
            lengths = [len(stage) for stage in stages]
            assert len(lengths) == pp_size
            assert lengths == sorted(lengths, reverse=True)
            assert lengths[0] - lengths[-1] in (0, 1)
        with pytest.raises(
            ConfigError,
            match=f"^p={num_layers + 1} pipeline stages need as many layers, the model has num_layers={num_layers};"
            f" choose p <= {num_layers}$",
        ):
            shape.split_layers(num_layers + 1)


def test_tensor_sizes_that_do_not_divide_are_all_named_with_those_that_do() -> None:
    shape = ModelShape.from_hf_config(
        plain(num_attention_heads=16, num_key_value_heads=8, intermediate_size=96)
    )
    assert shape.tp_problems(16) == ["t=16 does not divide num_kv_heads=8; choose 1, 2, 4 or 8"]
    assert shape.tp_problems(3, name="t_g") == [
        "t_g=3 does not divide num_heads=16; choose 1, 2, 4 or 8",
        "t_g=3 does not divide num_kv_heads=8; choose 1, 2, 4 or 8",
    ]
    for tp_size in range(1, 33):
        fits = all(size % tp_size == 0 for size in (16, 8, 96))
        assert (shape.tp_problems(tp_size) == []) is fits
    single = ModelShape.from_hf_config(plain(num_attention_heads=3, num_key_value_heads=1))
    assert single.tp_problems(3)[0] == "t=3 does not divide num_kv_heads=1; choose 1"


def test_generation_needs_kv_heads_that_are_shared_out_or_copied() -> None:
    """vLLM: t_g divides the query heads and the MLP; the KV heads divide t_g or are divided by it."""
    shape = ModelShape.from_hf_config(
        plain(num_attention_heads=24, num_key_value_heads=4, intermediate_size=96, vocab_size=384)
    )
    for tp_size in range(1, 33):
        fits = 24 % tp_size == 0 and 96 % tp_size == 0 and (4 % tp_size == 0 or tp_size % 4 == 0)
        fits &= 384 % tp_size == 0
        assert (shape.gen_tp_problems(tp_size, 1) == []) is fits, tp_size
    assert shape.gen_tp_problems(6, 4) == [
        "t_g=6 neither divides num_kv_heads=4 nor is a multiple of it; choose t_g from 1, 2, 4, 8, 12 or 24"
    ]
    assert shape.gen_tp_problems(16, 4) == [
        "t_g=16 does not divide num_heads=24; choose t_g from 1, 2, 4, 8, 12 or 24"
    ]
    assert replace(shape, ffn_hidden_size=100, vocab_size=100).gen_tp_problems(24, 1) == [
        "t_g=24 does not divide ffn_hidden_size=100; choose t_g from 1, 2 or 4",
        "t_g=24 does not divide 128, which is vocab_size=100 padded to a multiple of 64 as vLLM does;"
        " choose t_g from 1, 2 or 4",
    ]


def test_generation_needs_a_layer_for_every_stage() -> None:
    shape = ModelShape.from_hf_config(plain())
    assert shape.gen_pp_problems(3) == []
    assert shape.gen_pp_problems(4) == [
        "p_g=4 pipeline stages need as many layers, the model has num_layers=3; choose p_g <= 3"
    ]


def test_a_vocabulary_that_does_not_nest_is_refused_where_the_sizes_do() -> None:
    """Padded to 128 rows by vLLM, to 192 for t=6: rows 64 to 96 lie on tp 2, which gathers for gen tp 0 of 2."""
    shape = ModelShape.from_hf_config(
        plain(num_attention_heads=12, num_key_value_heads=12, intermediate_size=96, vocab_size=100)
    )
    assert shape.gen_tp_problems(2, 6) == [
        "t=6 does not divide 128, which is vocab_size=100 padded to a multiple of 64 as vLLM does, so that the"
        " vocabulary's training shards do not nest in those of t_g=2; choose t_g from 1 or 4, or another t"
    ]
    assert shape.gen_tp_problems(1, 6) == []  # one shard holds all rows
    assert shape.gen_tp_problems(4, 6) == []  # does not nest: weights move among whole replicas
    assert shape.gen_tp_problems(3, 6) == [
        "t_g=3 does not divide 128, which is vocab_size=100 padded to a multiple of 64 as vLLM does;"
        " choose t_g from 1 or 4"
    ]


def test_tensors_are_in_model_order_and_counted_once() -> None:
    shape = ModelShape.from_hf_config(plain())
    names = list(shape.tensors)
    assert (names[0], names[-2], names[-1]) == (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    )
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers) and set(layers) == {0, 1, 2}
    assert shape.num_parameters == sum(math.prod(size) for size in shape.tensors.values())
