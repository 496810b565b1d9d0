"""Checks of a run's models: checkpoints, GGUF files, architectures, presets and shapes, with value, rule and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from hybridengine.config import holder_shape, load_config, model_holders, model_shape
from hybridengine.errors import ConfigError, DataError
from hybridengine.families.registry import FAMILIES
from hybridengine.models.presets import PRESETS
from hybridengine.models.shapes import ModelShape
from hybridengine.training.files import RunFiles, claim_run, prepare_files
from tests.unit.test_checkpoint_files import CONFIG, write_checkpoint
from tests.unit.test_config import ROOT, problems_of


def test_a_missing_checkpoint_and_missing_files(tmp_path: Path, from_checkpoint: Path) -> None:
    found = problems_of(
        from_checkpoint,
        "model.path=/no/model",
        "data.train_file=/no/train",
        "data.eval_file=no/eval",
        "model.tokenizer=/no/tokenizer",
        "model.chat_template=/no/template",
        "critic.path=/no/critic",
        "warmup.file=/no/demonstrations",
    )
    assert sorted(found) == [
        "critic.path=/no/critic is not a folder; name one that exists",
        f"data.eval_file=no/eval is not a file; name one that exists, relative paths start at {Path.cwd()}",
        "data.train_file=/no/train is not a file; name one that exists",
        "model.chat_template=/no/template is not a file; name one that exists",
        "model.path=/no/model is not a folder; name one that exists",
        "model.tokenizer=/no/tokenizer is not a folder; name one that exists",
        "warmup.file=/no/demonstrations is not a file; name one that exists",
    ]


@pytest.mark.parametrize(
    ("gguf", "message"),
    [
        ("/no/m.gguf", "model.gguf=/no/m.gguf is not a file; name one that exists"),
        (
            "no_such_package:m.gguf",
            "model.gguf=no_such_package:m.gguf: package no_such_package is not installed;",
        ),
        ("yaml:m.gguf", "model.gguf=yaml:m.gguf is not a file; name a file of package yaml"),
    ],
)
def test_a_gguf_file_must_exist(tmp_path: Path, from_checkpoint: Path, gguf: str, message: str) -> None:
    description = tmp_path / "shape.json"
    description.write_text(json.dumps(CONFIG))
    overrides = ["model.path=null", f"model.hf_config={description}", f"model.gguf={gguf}"]
    (problem,) = problems_of(from_checkpoint, *overrides)
    assert problem.startswith(message)
    overrides[-1] = f"model.gguf={description}"
    assert load_config(from_checkpoint, overrides).model.gguf_file == description


def test_a_broken_checkpoint_is_described(tmp_path: Path, from_checkpoint: Path) -> None:
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (problem,) = problems_of(from_checkpoint)
    assert problem.startswith(f"model.path: {file} is not a whole safetensors file (")


def test_an_unsupported_architecture(tmp_path: Path, from_checkpoint: Path) -> None:
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(CONFIG | {"architectures": ["GPT2LMHeadModel"]}))
    (problem,) = problems_of(from_checkpoint)
    assert "model.path: " in problem
    assert "architectures=['GPT2LMHeadModel'] is not supported; use one of DeepseekV3ForCausalLM, " in problem


def test_each_role_is_checked_against_its_own_model(tmp_path: Path, from_checkpoint: Path) -> None:
    write_checkpoint(tmp_path / "critic", CONFIG | {"num_key_value_heads": 2, "num_hidden_layers": 1})
    sizes = [f"critic.path={tmp_path / 'critic'}", "cluster.ranks_per_node=[2]", "actor.parallel=2-1-1"]
    (problem,) = problems_of(from_checkpoint, *sizes)
    assert problem.startswith(
        "actor.parallel=2-1-1: p=2 pipeline stages need as many layers, the model has num_layers=1"
    )
    config = load_config(from_checkpoint, [*sizes, "critic.parallel=1-2-1"])
    shapes = {holder.key: holder_shape(config, holder) for holder in model_holders(config)}
    assert (shapes["actor"].num_layers, shapes["critic"].num_layers) == (2, 1)
    assert shapes["reference"] == model_shape(config)
    (problem,) = problems_of(from_checkpoint, *sizes[1:], "critic.parallel=1-2-1")
    assert problem.startswith("critic.parallel=1-2-1: t=2 does not divide num_kv_heads=1; choose 1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, " has no score head, a reward model gives one score; use a ...ForSequenceClassification"),
        (
            {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 2},
            " has 2 labels, a reward model",
        ),
        ({"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}, None),
    ],
)
def test_a_reward_model_has_one_label(
    tmp_path: Path, from_checkpoint: Path, change: dict[str, Any], message: str | None
) -> None:
    folder = write_checkpoint(tmp_path / "reward", CONFIG | change)
    overrides = ["reward.kind=model", f"reward.path={folder}"]
    if message is None:
        assert load_config(from_checkpoint, overrides).model_roles == (
            "actor",
            "critic",
            "reference",
            "reward",
        )
        return
    (problem,) = problems_of(from_checkpoint, *overrides)
    assert f"reward.path={folder}{message}" in problem


def test_a_dry_run_needs_no_checkpoint_where_the_shapes_are_given(
    tmp_path: Path, from_checkpoint: Path
) -> None:
    description = tmp_path / "shape.json"
    description.write_text(json.dumps(CONFIG | {"num_hidden_layers": 5}))
    absent = ["model.path=/no/model", f"model.hf_config={description}", "data.train_file=/no/train"]
    config = load_config(from_checkpoint, absent, dry_run=True)
    assert model_shape(config).num_layers == 5
    assert len(problems_of(from_checkpoint, *absent)) == 2  # a real run needs both
    (problem,) = problems_of(from_checkpoint, "model.path=/no/model", dry_run=True)
    assert problem.endswith("or give model.hf_config")
    (problem,) = problems_of(from_checkpoint, f"model.hf_config={description}")
    assert problem.startswith(f"model.hf_config={description} describes another model than ")
    (problem,) = problems_of(from_checkpoint, "model.hf_config=/no/config.json", dry_run=True)
    assert problem.startswith(
        "model.hf_config: model '/no/config.json' is not a preset (presets are llama3-8b, "
    )


def test_a_preset_gives_the_shapes(from_checkpoint: Path) -> None:
    absent = ["model.path=/no/model", "data.train_file=/no/train"]
    config = load_config(from_checkpoint, [*absent, "model.hf_config=llama3-70b"], dry_run=True)
    assert model_shape(config) == PRESETS["llama3-70b"].shape()
    problem, *_ = problems_of(from_checkpoint, *absent, "model.hf_config=lama3-70b", dry_run=True)
    assert problem.startswith("model.hf_config: model 'lama3-70b'") and "did you mean llama3-70b" in problem
    (problem,) = problems_of(from_checkpoint, "model.hf_config=llama3-70b")
    assert problem.startswith("model.hf_config=llama3-70b describes another model than ")


def test_a_gguf_file_needs_more_than_a_preset(tmp_path: Path, from_checkpoint: Path) -> None:
    for given in ("llama3-70b", str(tmp_path / "model")):
        overrides = ["model.path=null", f"model.gguf={from_checkpoint}", f"model.hf_config={given}"]
        (problem,) = problems_of(from_checkpoint, *overrides)
        assert f"needs a file model.hf_config, found {given}; name the config.json" in problem


def test_model_shape_without_a_model(tmp_path: Path, from_checkpoint: Path) -> None:
    config = load_config(from_checkpoint)
    without = config.model_copy(update={"model": config.model.model_copy(update={"path": None})})
    with pytest.raises(ConfigError, match="given by none of path, gguf and build"):
        model_shape(without)


def test_a_built_model_has_the_shape_that_its_section_says(built: Path) -> None:
    for family, described in FAMILIES.items():
        if described.has_vision:
            continue
        overrides = [f"model.build.family={family}"]
        if described.latent_keys:
            overrides += ["model.build.num_kv_heads=4", "model.build.tied_embeddings=false"]
        if not described.has_classifier:
            overrides += ["algorithm.name=grpo", "rollout.samples_per_prompt=2"]
        config = load_config(built, overrides)
        assert config.model.build is not None
        contents = config.model.build.hf_config()
        theirs = transformers.AutoConfig.for_model(
            **{k: v for k, v in contents.items() if k != "architectures"}
        )
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(theirs)
        shape = model_shape(config)
        kept = {name: one for name, one in model.named_buffers() if name.endswith("_correction_bias")}
        held = revert_weight_conversion(
            model, {**dict(model.named_parameters()), **kept}
        )  # experts are stacked in memory
        assert shape.tensors == {name: tuple(tensor.shape) for name, tensor in held.items()}
        saved = json.loads(model.config.to_json_string()) | {"architectures": contents["architectures"]}
        assert ModelShape.from_hf_config(saved) == shape
    shape = model_shape(load_config(built, ["model.build.family=llama", "model.build.tied_embeddings=false"]))
    assert (shape.family, shape.tied_embeddings) == ("llama", False)
    shape = model_shape(load_config(built))
    assert (shape.family, shape.vocab_size, shape.head_dim) == ("qwen3", 57, 32)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.max_positions) == (4, 4, 2, 128)


def test_a_family_without_score_heads_has_no_critic(built: Path) -> None:
    (problem,) = problems_of(built, "model.build.family=granite")
    assert problem == (
        "critic: granite has no model with a score head in transformers, as critics and reward models are; use a model of"
        " another family for them, or an algorithm without them"
    )


def test_rows_must_fit_every_models_positions(tmp_path: Path, from_checkpoint: Path) -> None:
    critic = write_checkpoint(tmp_path / "critic", CONFIG | {"max_position_embeddings": 12})
    width = load_config(from_checkpoint).max_tokens
    (problem,) = problems_of(from_checkpoint, f"critic.path={critic}")
    assert problem.endswith(
        f" = {width} tokens exceed those of critic.path={critic}, max_positions=12; take {width - 12} fewer"
    )


def test_rows_of_the_data_must_fit_the_positions_too() -> None:
    (problem,) = problems_of(ROOT / "configs/sft.yaml", "data.max_tokens=100")
    assert problem == "data.max_tokens=100 exceeds the model's max_positions=64; take 36 fewer"


FEW_ROWS = ("data.task.train_rows=64", "data.task.eval_rows=8")


def test_every_model_must_know_the_actors_tokens(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer of the task has 57 tokens."""
    monkeypatch.chdir(tmp_path)
    for name, vocab_size in (("small", 20), ("large", 64)):
        changes = {"vocab_size": vocab_size, "num_key_value_heads": 2, "max_position_embeddings": 128}
        write_checkpoint(tmp_path / name, CONFIG | changes)
    config, _ = claim_run(load_config(built, [*FEW_ROWS, f"critic.path={tmp_path / 'small'}"]))
    with pytest.raises(
        DataError, match=r"critic\.path=.*small has vocab_size=20, the actor's tokenizer .* has 57 tokens"
    ):
        prepare_files(config)
    prepare_files(claim_run(load_config(built, [*FEW_ROWS, f"critic.path={tmp_path / 'large'}"]))[0])


def test_a_config_that_transformers_refuses_is_found_before_ranks_start(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run resumes with the files that it has."""
    monkeypatch.chdir(tmp_path)
    config, _ = claim_run(load_config(built, FEW_ROWS))
    prepare_files(config)
    file = config.model_folder / "config.json"
    described = json.loads(file.read_text())
    for key, value in (
        ("bos_token_id", "abc"),
        ("dtype", "banana"),
        ("use_cache", "no"),
        ("attention_dropout", "a"),
    ):
        file.write_text(json.dumps(described | {key: value}))
        with pytest.raises(DataError, match=rf"{file} is not accepted by transformers .*{value}"):
            prepare_files(config)


def test_what_belongs_to_the_weights_is_kept_from_the_beginning(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer of `model.tokenizer`, and no file of the model's folder, which may be gone when the run ends."""
    monkeypatch.chdir(tmp_path)
    prepare_files(claim_run(load_config(built, [*FEW_ROWS, "run.name=first"]))[0])
    first = tmp_path / "runs" / "first" / "model"
    own = tmp_path / "tokenizer"
    own.mkdir()
    for file in first.glob("*token*"):
        file.rename(own / file.name)
    template = own / "chat_template.jinja"
    if (first / template.name).exists():
        (first / template.name).rename(template)
    (first / "README.md").write_text("# A model\n")
    (first / "vocab.json").write_text("{}")
    config, _ = claim_run(
        load_config(
            built,
            [
                *FEW_ROWS,
                "run.name=second",
                f"model.path={first}",
                "model.build=null",
                f"model.tokenizer={own}",
            ],
        )
    )
    prepare_files(config)
    kept = {file.name: file.read_bytes() for file in config.companions_folder.iterdir()}
    expected = {file.name: file.read_bytes() for file in own.iterdir()}
    for name in ("config.json", "generation_config.json", "README.md"):
        expected[name] = (first / name).read_bytes()
    assert kept == expected


@pytest.mark.parametrize("has_one", [False, True])
def test_a_template_of_the_run(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch, has_one: bool
) -> None:
    """For a tokenizer that has one or none; prompts and exports have it, and the tokenizer's folder stays as it is."""
    monkeypatch.chdir(tmp_path)
    first = prepare_files(claim_run(load_config(built, [*FEW_ROWS, "run.name=first"]))[0])
    own = tmp_path / "runs" / "first" / "model"
    if not has_one:
        (own / "chat_template.jinja").unlink()
    before = {file.name: file.read_bytes() for file in own.iterdir()}
    template = tmp_path / "template.jinja"
    template.write_text("{% for one in messages %}{{ one.content }}={% endfor %}")
    again = [*FEW_ROWS, "run.name=second", f"model.path={own}", "model.build=null"]
    if not has_one:
        with pytest.raises(DataError, match=r"no chat template.* or name a file in model\.chat_template"):
            prepare_files(claim_run(load_config(built, [*again, "run.name=none"]))[0])
    config, _ = claim_run(load_config(built, [*again, f"model.chat_template={template.name}"]))
    files = prepare_files(config)
    asked = {text.removeprefix("user") for text in texts_of(first)}
    assert asked
    assert set(texts_of(files)) == {f"{text}=" for text in asked}
    assert {file.name: file.read_bytes() for file in own.iterdir()} == before
    assert (config.companions_folder / "chat_template.jinja").read_text() == template.read_text()
    template.write_text("changed since")
    assert texts_of(prepare_files(config)) == texts_of(files)
    template.write_text("{% for %}")
    (config.run_folder / "config.yaml").unlink()
    with pytest.raises(
        DataError, match=r"line 1: the chat template of .*/tokenizer fails \(TemplateSyntaxError: "
    ):
        prepare_files(config)


def texts_of(files: RunFiles) -> list[str]:
    """Return the prompts of a run without special tokens and the start of the assistant's turn."""
    found = files.tokenizer.batch_decode(files.prompts.tokens, skip_special_tokens=True)
    return [text.removesuffix("assistant") for text in found]
