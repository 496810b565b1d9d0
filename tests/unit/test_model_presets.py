"""Presets compared with the published parameter counts, and the values that `--model` accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridengine.errors import ConfigError
from hybridengine.models.presets import PRESETS, find_preset, resolve_model

PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "mistral-7b": 7_248_023_552,
    "phi-4": 14_659_507_200,
    "gemma3-1b": 999_885_952,
    "glm4-32b": 32_566_081_536,
    "granite3.3-8b": 8_170_864_640,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "deepseek-v3": 671_026_404_352 + 58 * 256,
    "qwen2.5-vl-7b": 8_292_166_656,
}
"""Numbers of parameters on the model cards of Hugging Face; of DeepSeek-V3 those of transformers' model and the expert
biases of its 58 mixtures; of Qwen2.5-VL with the vision tower."""


def test_every_preset_has_a_published_count() -> None:
    assert list(PRESETS) == list(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    shape = PRESETS[name].shape()
    assert shape.num_parameters + shape.num_frozen == PUBLISHED[name]
    assert resolve_model(name) == shape


def test_what_the_count_does_not_show() -> None:
    llama31, qwen3, qwen2 = (PRESETS[name].shape() for name in ("llama3-405b", "qwen3-32b", "qwen2.5-7b"))
    assert dict(llama31.rope_scaling)["factor"] == 8.0
    deepseek = PRESETS["deepseek-v3"].shape()
    assert deepseek.expert_layer(2) is None and deepseek.expert_layer(3) is not None
    assert deepseek.kv_token_bytes(1, 1, 8, "bfloat16") == 61 * (512 + 64) * 2
    assert (qwen3.head_dim, qwen3.q_size, qwen3.hidden_size) == (128, 8192, 5120)
    assert "model.layers.0.self_attn.q_norm.weight" in qwen3.tensors
    assert "model.layers.0.self_attn.q_proj.bias" in qwen2.tensors
    gemma = PRESETS["gemma3-1b"].shape()
    assert [gemma.window(layer) for layer in range(7)] == [512] * 5 + [0, 512]
    assert (gemma.rope_theta, gemma.window_rope_theta, gemma.query_scalar) == (1e6, 1e4, 256)
    glm = PRESETS["glm4-32b"].shape()
    assert (glm.rotary_dim, glm.head_dim, glm.qkv_bias) == (64, 128, False)
    assert glm.tp_problems(4) == ["t=4 does not divide num_kv_heads=2; choose 1 or 2"]
    assert {name: preset.shape().max_positions for name, preset in PRESETS.items() if "llama" in name} == {
        "llama3-8b": 8192,
        "llama3-70b": 8192,
        "llama3-405b": 131072,
        "llama2-7b": 4096,
        "llama2-13b": 4096,
        "llama2-70b": 4096,
        "codellama-34b": 16384,
    }


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama3-70b", "llama3-70b"),
        ("Llama-3-70B", "llama3-70b"),
        ("LLAMA3_70B", "llama3-70b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama3-70b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
    ],
)
def test_names_as_people_write_them(text: str, name: str) -> None:
    preset = find_preset(text)
    assert preset is not None
    assert preset.name == name


@pytest.mark.parametrize("text", ["", "llama3-7b", "llama", "7b"])
def test_no_preset(text: str) -> None:
    assert find_preset(text) is None


def config_of(name: str) -> str:
    return json.dumps(dict(PRESETS[name].config))


def test_a_config_file_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_of("qwen3-8b"))
    (tmp_path / "other.json").write_text(config_of("qwen3-32b"))
    assert resolve_model(str(tmp_path)) == PRESETS["qwen3-8b"].shape()
    assert resolve_model(str(tmp_path / "config.json")) == PRESETS["qwen3-8b"].shape()
    assert resolve_model(str(tmp_path / "other.json")) == PRESETS["qwen3-32b"].shape()


def test_a_preset_wins_over_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen3-8b").mkdir()
    Path("qwen3-8b/config.json").write_text(config_of("qwen3-32b"))
    assert resolve_model("qwen3-8b") == PRESETS["qwen3-8b"].shape()
    assert resolve_model("./qwen3-8b") == PRESETS["qwen3-32b"].shape()


def test_a_misspelt_preset_names_the_nearest() -> None:
    words = (
        r"'lama3-70b' is not a preset \(did you mean llama3-70b or .*presets are llama3-8b, .*does not exist"
    )
    with pytest.raises(ConfigError, match=words):
        resolve_model("lama3-70b")


def test_a_name_that_no_file_can_have_is_no_model() -> None:
    with pytest.raises(ConfigError, match=r"is not a preset .* cannot be read"):
        resolve_model("x" * 300)


def test_what_is_no_model_names_the_presets(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "other.json").write_text(json.dumps({"architectures": ["BloomForCausalLM"]}))
    (tmp_path / "sizes.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": -1})
    )
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "weights.bin").write_text("x")
    for name, part in {
        "": "does not exist",
        "list.json": "not an object",
        "broken.json": "not valid JSON",
        "bytes.json": "is not UTF-8 text",
        "other.json": "BloomForCausalLM",
        "sizes.json": "hidden_size",
        "folder.json": "is a folder, not a regular file",
        "weights.bin": "cannot be read",
    }.items():
        with pytest.raises(ConfigError, match=part) as raised:
            resolve_model(str(tmp_path / name))
        assert str(tmp_path) in str(raised.value)
