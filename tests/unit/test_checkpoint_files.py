"""Checkpoint files: complete ones pass, and each kind of defect is named, from headers alone."""

from __future__ import annotations

import importlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from hybridengine.errors import CheckpointError
from hybridengine.models.checkpoint_files import check_checkpoint, checkpoint_problems, tensors_of
from hybridengine.models.shapes import LM_HEAD, ModelShape

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}

GATE = "model.layers.1.mlp.gate_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def write_safetensors(file: Path, tensors: dict[str, tuple[int, ...]], dtype: str = "F32") -> None:
    """Write a file with zeros by hand, following the format's description."""
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = math.prod(shape) * {"F32": 4, "BF16": 2, "I64": 8, "F8_E4M3": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] = CONFIG,
    shards: int = 1,
    dtype: str = "F32",
    change: dict[str, tuple[int, ...] | None] | None = None,
) -> Path:
    """Write a checkpoint that matches `config`, except for the shapes in `change` (None omits the tensor)."""
    tensors = ModelShape.from_hf_config(config).tensors | (change or {})
    stored = {name: shape for name, shape in tensors.items() if shape is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", stored, dtype)
        return folder
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    weight_map = {tensor: names[index % shards] for index, tensor in enumerate(stored)}
    for name in names:
        write_safetensors(
            folder / name, {t: stored[t] for t, file in weight_map.items() if file == name}, dtype
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("tied", [True, False])
def test_complete_checkpoint_gives_its_shape(tmp_path: Path, shards: int, dtype: str, tied: bool) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    shape = check_checkpoint(write_checkpoint(tmp_path, config, shards, dtype))
    assert shape == ModelShape.from_hf_config(config)


def test_a_tied_head_may_be_stored_as_well(tmp_path: Path) -> None:
    assert checkpoint_problems(write_checkpoint(tmp_path, change={LM_HEAD: (10, 8)})) == []


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("row", [0, 9])
def test_a_stored_tied_head_must_be_the_embedding(tmp_path: Path, shards: int, row: int) -> None:
    """transformers 5 uses a stored head that differs from the embedding, whatever config.json says."""
    torch = importlib.import_module("torch")
    safetensors = importlib.import_module("safetensors.torch")
    reader = importlib.import_module("hybridengine.checkpoints.hf_files")
    folder = write_checkpoint(tmp_path, shards=shards, change={LM_HEAD: (10, 8)})
    assert reader.check_weights(folder) == ModelShape.from_hf_config(CONFIG)
    file = tensors_of(folder)[LM_HEAD].file
    tensors = safetensors.load_file(file)
    tensors[LM_HEAD][row, 3] = torch.tensor(1.0)
    safetensors.save_file(tensors, file)
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight is stored and differs from model.embed_tokens"
    ):
        reader.check_weights(folder)


def test_a_stored_tied_head_must_have_the_embedding_shape(tmp_path: Path) -> None:
    (problem,) = checkpoint_problems(write_checkpoint(tmp_path, change={LM_HEAD: (11, 8)}))
    assert "lm_head.weight is [11, 8], not [10, 8]" in problem


def test_missing_folder_names_config_and_weights(tmp_path: Path) -> None:
    problems = checkpoint_problems(tmp_path / "nowhere")
    assert len(problems) == 2
    assert f"{tmp_path}/nowhere/config.json does not exist" in problems[0]
    assert "has neither model.safetensors nor model.safetensors.index.json" in problems[1]


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=3)
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    problems = checkpoint_problems(tmp_path)
    assert len(problems) == 2
    for number, problem in zip((1, 3), problems, strict=True):
        assert f"model-0000{number}-of-00003.safetensors, named by model.safetensors.index.json" in problem
        assert problem.endswith("does not exist; restore it")


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -100, -1])
def test_truncated_files(tmp_path: Path, kept: int) -> None:
    file = write_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    (problem,) = checkpoint_problems(tmp_path)
    assert problem.startswith(f"{file} is not a whole safetensors file (")
    assert problem.endswith("; copy the file again from where it came")


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 77)
        + b'{"model.norm.weight": {"dtype": ["F32"], "shape": [0], "data_offsets":[0,0]}}',
    ],
)
def test_other_files_are_no_safetensors_files(tmp_path: Path, content: bytes) -> None:
    (write_checkpoint(tmp_path) / "model.safetensors").write_bytes(content)
    (problem,) = checkpoint_problems(tmp_path)
    assert "is not a whole safetensors file" in problem


def test_disagreements_with_the_config_are_all_listed(tmp_path: Path) -> None:
    norm = "model.layers.0.input_layernorm.weight"
    write_checkpoint(
        tmp_path,
        change={norm: None, GATE: (12, 9), UP: (1,) * 500, "model.layers.2.mlp.up_proj.weight": (12, 8)},
    )
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(tmp_path)
    text = str(caught.value)
    assert text.startswith("3 problems:")
    assert f"1 tensor ({norm}) described by {tmp_path}/config.json but not stored" in text
    assert "1 tensor (model.layers.2.mlp.up_proj.weight) stored but not described by" in text
    assert f"{GATE} is [12, 9], not [12, 8]" in text
    assert f"{UP} is [1, 1, 1, 1, and 496 more], not [12, 8]" in text
    assert text.count("restore the original pair") == 3


def test_experts_in_one_tensor_are_named_with_the_way_out(tmp_path: Path) -> None:
    config = CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 6}
    config |= {"num_experts_per_tok": 2, "head_dim": 4}
    names = [name for name in ModelShape.from_hf_config(config).tensors if ".experts." in name]
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    stacks = {f"{layer}.gate_up_proj": (4, 12, 8) for layer in layers}
    stacks |= {f"{layer}.down_proj": (4, 8, 6) for layer in layers}
    write_checkpoint(tmp_path, config, change=dict.fromkeys(names) | stacks)
    (problem,) = checkpoint_problems(tmp_path)
    assert problem.startswith(f"{tmp_path}: 4 tensors ({layers[0]}.down_proj, ")
    assert problem.endswith("load the folder with transformers 5 and write it with save_pretrained")


def test_a_config_with_more_layers_names_only_the_first_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    (problem,) = checkpoint_problems(tmp_path)
    assert "12 tensors (model.layers.2.input_layernorm.weight, " in problem
    assert "and 8 more)" in problem


def test_an_untied_head_that_is_not_stored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
    (problem,) = checkpoint_problems(tmp_path)
    assert "1 tensor (lm_head.weight) described by" in problem


@pytest.mark.parametrize("dtype", ["I64", "F8_E4M3"])
def test_weights_of_another_kind(tmp_path: Path, dtype: str) -> None:
    (problem,) = checkpoint_problems(write_checkpoint(tmp_path, dtype=dtype))
    assert f"model.embed_tokens.weight ({dtype})" in problem
    assert "convert the checkpoint to float32 or bfloat16" in problem


def test_the_single_file_counts_where_an_index_is_beside_it_as_in_transformers(tmp_path: Path) -> None:
    """A stale index names shards with other weights: the check covers what is loaded."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    reader = importlib.import_module("hybridengine.checkpoints.hf_files")
    write_checkpoint(tmp_path, shards=2)
    write_checkpoint(tmp_path, CONFIG | {"model_type": "qwen2"})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-32] + struct.pack("<8f", *range(8)))
    norm = "model.norm.weight"
    found = reader.SafetensorsFolder(tmp_path).read(norm, ((0, 8),))
    assert found.tolist() == list(range(8))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.state_dict()[norm], found)
    assert {tensor.file for tensor in tensors_of(tmp_path).values()} == {file}


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/model.safetensors", "sub/x", "..", ""])
def test_an_index_names_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path / "other")
    write_checkpoint(tmp_path / "model", shards=2)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {GATE: name}}))
    (problem,) = checkpoint_problems(tmp_path / "model")
    assert str(index) in problem
    assert "is not a file of its folder; restore the original file" in problem
    with pytest.raises(CheckpointError, match="is not a file of its folder"):
        tensors_of(tmp_path / "model")


def test_files_may_be_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "blobs", shards=2)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(Path("../blobs") / file.name)
    assert checkpoint_problems(tmp_path / "snapshot") == []


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    first, second = (tmp_path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    second.write_bytes(first.read_bytes())
    problem, *_ = checkpoint_problems(tmp_path)
    assert f" is stored in {first.name} and in {second}; restore the original files" in problem


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_told_with_file_and_tensor(tmp_path: Path, value: float) -> None:
    reader = importlib.import_module("hybridengine.checkpoints.hf_files")
    file = write_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + struct.pack("<f", value))
    folder = reader.SafetensorsFolder(tmp_path)
    assert folder.read("model.norm.weight", ((0, 7),)).tolist() == [0.0] * 7
    with pytest.raises(
        CheckpointError, match=f"{file}: model.norm.weight has values that are NaN or infinite"
    ):
        folder.read("model.norm.weight", ((4, 8),))
    assert folder.read("model.norm.weight", ((8, 8),)).tolist() == []


def test_unsupported_architecture_is_found_beside_a_broken_file(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["MambaForCausalLM"]}))
    first, second = checkpoint_problems(tmp_path)
    assert f"{tmp_path}/config.json: architectures=['MambaForCausalLM'] is not supported; use one of" in first
    assert "is not a whole safetensors file" in second


@pytest.mark.parametrize(
    "text", ["{}", "not json", "[1]", "[" * 100_000, '{"weight_map": {}}', '{"weight_map": {"a": 3}}']
)
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    (problem,) = checkpoint_problems(tmp_path)
    assert "model.safetensors.index.json" in problem
    assert "restore the original file" in problem
