"""Model shapes compared with transformers' own models, which are built without memory on the meta device."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hybridengine.errors import ConfigError
from hybridengine.families.registry import FAMILIES
from hybridengine.models.shapes import ModelShape
from tests.unit.model_configs import IMAGE_TOKENS, SIZES, plain, vision_entries

PREFIXES = {family.hf_prefix: family for family in FAMILIES.values()}
"""Prefix of a family's classes in transformers -> family."""
WITHOUT_HEAD_DIM = ("Qwen2", "Phi3", "Qwen2_5_VL")
"""Families whose head_dim is hidden_size / num_attention_heads."""
LATENT = "DeepseekV3"
"""A family with as many key heads as query heads, and a head of its own."""


def hf_config(family: str, task: str = "CausalLM", **changes: Any) -> Any:
    """Return a transformers configuration of `family`, with its architecture set."""
    transformers = importlib.import_module("transformers")
    sizes = {**SIZES, **PREFIXES[family].built_config, **changes}
    if family in WITHOUT_HEAD_DIM:
        sizes.pop("head_dim", None)
    if PREFIXES[family].has_vision:
        sizes |= {**vision_entries(sizes["hidden_size"], sizes["num_attention_heads"]), **IMAGE_TOKENS}
    if family == LATENT:
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": 64}
    config = getattr(transformers, f"{family}Config")(**sizes)
    config.architectures = [PREFIXES[family].architectures[task == "SequenceClassification"]]
    return config


def hf_tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that transformers saves for a model; tied weights are saved once."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    tied = set(model.all_tied_weights_keys)
    held = {name: value for name, value in model.state_dict().items() if name not in tied}
    # In memory, experts are stacked.
    return {name: tuple(value.shape) for name, value in revert_weight_conversion(model, held).items()}


def saved(config: Any) -> dict[str, Any]:
    """Return the contents that transformers writes to config.json."""
    return json.loads(config.to_json_string(use_diff=True))


@pytest.mark.parametrize(
    ("family", "tied"), [one for one in product(PREFIXES, (False, True)) if one != (LATENT, True)]
)
def test_tensors_equal_those_of_transformers(family: str, tied: bool) -> None:
    for heads, kv_heads in ((6, 2), (6, 6), (6, 1), (4, 2)):
        config = hf_config(
            family, num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied
        )
        shape = ModelShape.from_hf_config(saved(config))
        assert shape.tensors | shape.vision_tensors == hf_tensors(config)
        assert shape.tied_embeddings is tied
        assert ("lm_head.weight" in shape.tensors) is not tied


@pytest.mark.parametrize(
    ("family", "num_labels"),
    list(product([name for name, family in PREFIXES.items() if family.has_classifier], (1, 2, 5))),
)
def test_sequence_classification_tensors_equal_those_of_transformers(family: str, num_labels: int) -> None:
    for tied in (False, True):  # a classifier has no head to tie
        config = hf_config(family, "SequenceClassification", num_labels=num_labels, tie_word_embeddings=tied)
        shape = ModelShape.from_hf_config(saved(config))
        assert shape.num_labels == num_labels
        assert shape.tied_embeddings is False
        assert shape.tensors == hf_tensors(config)
        assert shape.tensors["score.weight"] == (num_labels, 48)


@pytest.mark.parametrize("family", PREFIXES)
def test_parameter_counts_equal_those_of_transformers(family: str) -> None:
    import torch
    import transformers

    for tied in (False, True) if family != LATENT else (False,):
        config = hf_config(family, tie_word_embeddings=tied)
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
        # A shared one counts once, and an expert bias, which is a buffer, as well.
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("_correction_bias")]
        expected = sum(one.numel() for one in [*model.parameters(), *biases])
        shape = ModelShape.from_hf_config(saved(config))
        assert shape.num_parameters + shape.num_frozen == expected
        expected = shape.num_parameters
        assert shape.weight_bytes("float32") == 4 * expected
        assert shape.weight_bytes("bfloat16") == shape.weight_bytes("float16") == 2 * expected


@pytest.mark.parametrize("family", PREFIXES)
def test_numbers_of_a_saved_configuration(family: str) -> None:
    config = hf_config(family)
    shape = ModelShape.from_hf_config(saved(config))
    assert (shape.family, shape.num_layers, shape.hidden_size) == (config.model_type, 3, 48)
    assert (shape.ffn_hidden_size, shape.vocab_size, shape.max_positions) == (80, 131, 96)
    num_kv_heads = 6 if family == LATENT else 2
    assert (shape.num_heads, shape.num_kv_heads) == (6, num_kv_heads)
    assert shape.head_dim == {LATENT: 32 + 64, **dict.fromkeys(WITHOUT_HEAD_DIM, 8)}.get(family, 16)
    assert (shape.q_size, shape.kv_size) == (6 * shape.head_dim, num_kv_heads * shape.head_dim)
    assert shape.norm_eps == 1e-5
    assert shape.num_labels == 0


@pytest.mark.parametrize(
    ("family", "absent"),
    [
        (family, key)
        for family in PREFIXES
        for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
        if (family, key) != (LATENT, "num_key_value_heads")  # transformers' default is refused
    ],
)
def test_absent_keys_mean_what_transformers_takes_them_for(family: str, absent: str) -> None:
    changes: dict[str, Any] = {"num_attention_heads": 32, "hidden_size": 192, "num_key_value_heads": 8}
    contents = saved(hf_config(family, **changes))
    contents.get("text_config", contents).pop(absent, None)
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{family}Config").from_dict(contents)
    shape = ModelShape.from_hf_config(contents)
    assert shape.tensors | shape.vision_tensors == hf_tensors(config)
    assert shape.max_positions == config.get_text_config().max_position_embeddings
    assert shape.norm_eps == config.get_text_config().rms_norm_eps


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
    assert shape.pp_problems(3, "p_g") == []
    assert shape.pp_problems(4, "p_g") == [
        "p_g=4 pipeline stages need as many layers, the model has num_layers=3; choose p_g <= 3"
    ]


def test_a_vocabulary_that_does_not_nest_is_refused_where_the_sizes_do() -> None:
    """vLLM pads to 128 rows, t=6 to 192: rows 64 to 96 lie on tp 2, which gathers for gen tp 0 of 2."""
    shape = ModelShape.from_hf_config(
        plain(num_attention_heads=12, num_key_value_heads=12, intermediate_size=96, vocab_size=100)
    )
    assert shape.gen_tp_problems(2, 6) == [
        "t=6 does not divide 128, which is vocab_size=100 padded to a multiple of 64 as vLLM does, so that the"
        " vocabulary's training shards do not nest in those of t_g=2; choose t_g from 1 or 4"
    ]
    assert shape.gen_tp_problems(1, 6) == []  # one shard holds all rows
    assert shape.gen_tp_problems(4, 6) == []  # does not nest: weights move between whole replicas
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
