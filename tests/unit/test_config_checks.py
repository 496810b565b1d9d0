"""Rules between values: sizes, rows, widths, schedules, models and files, with value, rule and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridengine.config import check_run, load_config, model_shape
from hybridengine.errors import ConfigError
from hybridengine.model_presets import PRESETS
from tests.unit.test_checkpoint_files import CONFIG, write_checkpoint
from tests.unit.test_config import problems_of

BUILT = """
cluster: {ranks_per_node: [4]}
model:
  build: {num_layers: 4, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 384, max_positions: 128}
data: {task: {}, batch_size: 8}
actor: {parallel: 2-2-1, generate: 1-1}
critic: {parallel: 1-2-2}
"""

FROM_CHECKPOINT = """
model: {path: MODEL}
data: {train_file: TRAIN, batch_size: 8}
rollout: {max_prompt_tokens: 16, max_response_tokens: 16}
"""


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """4 ranks, a model to build, actor 2-2-1 -> 1-1, critic 1-2-2."""
    path = tmp_path / "built.yaml"
    path.write_text(BUILT)
    return path


@pytest.fixture
def from_checkpoint(tmp_path: Path) -> Path:
    """1 rank, the small checkpoint of the checkpoint tests, an (unread) training file."""
    write_checkpoint(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("")
    path = tmp_path / "run.yaml"
    text = FROM_CHECKPOINT.replace("MODEL", str(tmp_path / "model"))
    path.write_text(text.replace("TRAIN", str(tmp_path / "train.jsonl")))
    return path


def test_the_configurations_of_these_tests_are_valid(built: Path, from_checkpoint: Path) -> None:
    for path in (built, from_checkpoint):
        assert check_run(load_config(path)) == []


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (  # sizes that do not multiply to the number of ranks
            ["critic.parallel=1-2-1"],
            [
                "critic.parallel=1-2-1 takes p·t·d = 1·2·1 = 2 ranks, which must equal the 4 of"
                " cluster.ranks_per_node=[4]; choose 1-2-2, or give the cluster 2 ranks"
            ],
        ),
        (
            ["cluster.ranks_per_node=[3,2]", "critic.parallel=2-2-1"],
            [
                "actor.parallel=2-2-1 takes p·t·d = 2·2·1 = 4 ranks, which must equal the 5 of"
                " cluster.ranks_per_node=[3, 2]; choose other sizes, or give the cluster 4 ranks",
                "critic.parallel=2-2-1 takes",
                "reference",
            ],
        ),
        (  # t against heads
            ["actor.parallel=1-4-1"],
            [
                "actor.parallel=1-4-1: t=4 does not divide num_kv_heads=2; choose 1 or 2",
            ],
        ),
        (
            ["critic.parallel=1-4-1", "model.build.num_kv_heads=4", "model.build.num_heads=4"],
            [],
        ),
        (  # p against layers
            ["cluster.ranks_per_node=[8]", "actor.parallel=8-1-1", "critic.parallel=4-2-1"],
            [
                "actor.parallel=8-1-1: p=8 pipeline stages need as many layers, the model has num_layers=4;"
                " choose p <= 4"
            ],
        ),
        (  # engines against ranks, and against the model
            ["actor.generate=1-3"],
            [
                "actor.generate=1-3: an engine's p_g·t_g = 1·3 = 3 ranks do not divide the 4 ranks of training 2-2-1;"
                " choose p_g-t_g from 1-2, 1-4, 1-1",
                "actor.generate=1-3: t_g=3 does not divide num_heads=4; choose t_g from 1, 2 or 4;"
                " the nearest p_g-t_g that can be: 1-2, 1-4, 1-1",
                "actor.generate=1-3: t_g=3 neither divides num_kv_heads=2 nor is a multiple of it;",
                "actor.generate=1-3: t_g=3 does not divide 64, which is vocab_size=57 padded to",
            ],
        ),
        (  # of the sizes that share out the ranks, the model's heads leave out 1-4
            ["actor.generate=1-8", "model.build.num_heads=6"],
            ["training 2-2-1; choose p_g-t_g from 1-2, 1-1, 2-2", "t_g=8 does not divide num_heads=6"],
        ),
        (["actor.generate=3-1"], ["p_g·t_g = 3·1 = 3 ranks do not divide the 4 ranks"]),
        (
            ["actor.generate=4-4"],
            ["16 ranks do not divide the 4 ranks of training 2-2-1; choose p_g-t_g from"],
        ),
        (["actor.generate=1-4"], []),  # an engine of all ranks, each KV head on two of them
        (["actor.generate=4-1"], []),  # more stages than training has
        (
            [
                "cluster.ranks_per_node=[6]",
                "actor.parallel=3-2-1",
                "critic.parallel=3-2-1",
                "actor.generate=2-1",
                "data.batch_size=6",
            ],
            [],
        ),
        (
            [
                "cluster.ranks_per_node=[8]",
                "actor.parallel=2-2-2",
                "critic.parallel=2-2-2",
                "actor.generate=8-1",
            ],
            [
                "actor.generate=8-1: p_g=8 pipeline stages need as many layers, the model has num_layers=4;"
                " choose p_g <= 4; the nearest p_g-t_g that can be: 4-1, 4-2, 2-1"
            ],
        ),
        (
            ["actor.generate=1-4", "model.build.num_heads=6"],
            [
                "actor.generate=1-4: t_g=4 does not divide num_heads=6; choose t_g from 1 or 2;"
                " the nearest p_g-t_g that can be: 1-2, 1-1, 2-2"
            ],
        ),
        (
            [
                "actor.generate=1-3",
                "model.build=null",
                "model.path=/no/model",
            ],  # nothing is known of the model
            [
                "3 ranks do not divide the 4 ranks of training 2-2-1; choose p_g-t_g from 1-2, 1-4, 1-1",
                "/no/model",
            ],
        ),
        (  # widths
            ["rollout.max_prompt_tokens=100"],
            [
                "rollout.max_prompt_tokens=100 + max_response_tokens=64 = 164 tokens exceed the model's"
                " max_positions=128; lower them by 36"
            ],
        ),
        (
            ["rollout.kv_cache_bytes=262143"],  # 2 · 4 layers · 2 KV heads · 32 · 4 bytes · 128 tokens
            [
                "rollout.kv_cache_bytes=262143 must hold one sequence of 128 tokens, which takes 262144 bytes at"
                " p_g-t_g = 1-1; raise it to a multiple of 262144"
            ],
        ),
        (["rollout.kv_cache_bytes=256KiB"], []),
        (["rollout.kv_cache_bytes=64KiB", "actor.generate=2-2"], []),  # a quarter of it on each rank
        (
            ["critic.micro_batch_tokens=100"],
            [
                "critic.micro_batch_tokens=100 must hold one row of 128 tokens (prompt and response);"
                " raise it to at least 128"
            ],
        ),
        (
            ["model.build.head_dim=16", "cluster.device=cpu"],
            ["head_dim=16 is not a multiple of 32, which vLLM needs on a CPU; use another model, or"],
        ),
        (["model.build.head_dim=16", "cluster.device=cuda"], []),
        (  # rows
            ["data.batch_size=6"],
            [
                "data.batch_size=6 · rollout.samples_per_prompt=1 = 6 rows must split evenly over the"
                " p·t·d / (p_g·t_g) = 4 engines of actor.parallel=2-2-1, actor.generate=1-1; choose a multiple of 4"
            ],
        ),
        (["data.batch_size=6", "rollout.samples_per_prompt=2"], []),
        (
            ["data.batch_size=4", "critic.mini_batches=4"],
            [
                "must split evenly over 4 mini-batches of critic and the d = 2 replicas of critic.parallel=1-2-2;"
                " choose a multiple of 8"
            ],
        ),
        (
            ["actor.parallel=1-2-2", "warmup.batch_size=3"],
            [
                "warmup.batch_size=3 must split evenly over the d = 2 replicas of actor.parallel=1-2-2;"
                " choose a multiple of 2"
            ],
        ),
        (  # schedules
            ["run.steps=5", "actor.mini_batches=2", "actor.optimizer.warmup_steps=10"],
            [
                "actor.optimizer.warmup_steps=10 must be fewer than the run's 10 optimizer steps; choose at most 9"
            ],
        ),
        (["run.steps=5", "actor.mini_batches=2", "actor.optimizer.warmup_steps=9"], []),
        (
            ["critic.optimizer.min_lr=0.1"],
            ["critic.optimizer.min_lr=0.1 exceeds critic.optimizer.lr=1e-05; lower min_lr"],
        ),
        (  # sources
            ["model.path=x", "model.hf_config=qwen2.5-7b"],
            [
                "model must be given by exactly one of path, gguf, build, found path and build; leave out all but one"
            ],
        ),
        (
            ["model.build=null"],
            ["model must be given by exactly one of path, gguf, build, found none; add one"],
        ),
        (
            ["data.task=null"],
            ["data must be given by exactly one of train_file, task, found none; add one"],
        ),
        (
            ["model.build=null", "model.gguf=m.gguf"],
            ["model.gguf=m.gguf needs model.hf_config; name the config.json of the same model"],
        ),
        (["data.eval_file=e.jsonl"], ["data.eval_file=e.jsonl is not read, since data.task generates"]),
        (
            ["reward.kind=model"],
            ["reward.kind=model needs a checkpoint; give reward.path, or reward.kind=function"],
        ),
        (
            ["data.task.min_terms=4"],
            ["data.task.min_terms=4 exceeds data.task.max_terms=3; lower the one or raise the other"],
        ),
        (
            ["model.build.num_kv_heads=3"],
            ["model.build: num_key_value_heads=3 does not divide num_attention_heads=4"],
        ),
        (
            ["actor.parallel=2-2-2", "actor.generate=1-3", "data.batch_size=7", "run.steps=1"],
            ["takes p·t·d", "takes p·t·d", "t_g=3", "choose a multiple of 2", "choose a multiple of 2"],
        ),
    ],
)
def test_rules(built: Path, overrides: list[str], messages: list[str]) -> None:
    if not messages:
        load_config(built, overrides, dry_run=True)
        return
    found = problems_of(built, *overrides, dry_run=True)
    if messages[-1] == "reference":  # which has the actor's sizes, and so the same message
        messages = messages[:-1]
    for message in messages:
        assert any(message in text for text in found), found
    if "2-2-2" not in str(overrides):
        assert len(found) == len(messages), found


def test_a_missing_checkpoint_and_missing_files(tmp_path: Path, from_checkpoint: Path) -> None:
    found = problems_of(
        from_checkpoint,
        "model.path=/no/model",
        "data.train_file=/no/train",
        "data.eval_file=no/eval",
        "model.tokenizer=/no/tokenizer",
        "critic.path=/no/critic",
        "warmup.file=/no/demonstrations",
    )
    assert sorted(found) == [
        "critic.path=/no/critic is not a folder; name one that exists",
        f"data.eval_file=no/eval is not a file; name one that exists, relative paths start at {Path.cwd()}",
        "data.train_file=/no/train is not a file; name one that exists",
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


def test_a_warmup_without_demonstrations(from_checkpoint: Path) -> None:
    found = problems_of(from_checkpoint, "warmup.steps=3")
    assert found == ["warmup needs demonstrations; give warmup.file, or data.task, or leave warmup out"]


def test_a_broken_checkpoint_is_described(tmp_path: Path, from_checkpoint: Path) -> None:
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (problem,) = problems_of(from_checkpoint)
    assert problem.startswith(f"model.path: {file} is truncated: its header describes")


def test_an_unsupported_architecture(tmp_path: Path, from_checkpoint: Path) -> None:
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(CONFIG | {"architectures": ["GPT2LMHeadModel"]}))
    (problem,) = problems_of(from_checkpoint)
    assert "model.path: " in problem
    assert "architectures=['GPT2LMHeadModel'] is not supported; use one of LlamaForCausalLM, " in problem


def test_each_role_is_checked_against_its_own_model(tmp_path: Path, from_checkpoint: Path) -> None:
    write_checkpoint(tmp_path / "critic", CONFIG | {"num_key_value_heads": 2, "num_hidden_layers": 1})
    sizes = [f"critic.path={tmp_path / 'critic'}", "cluster.ranks_per_node=[2]", "actor.parallel=2-1-1"]
    (problem,) = problems_of(from_checkpoint, *sizes)
    assert problem.startswith(
        "actor.parallel=2-1-1: p=2 pipeline stages need as many layers, the model has num_layers=1"
    )
    config = load_config(from_checkpoint, [*sizes, "critic.parallel=1-2-1"])
    assert (model_shape(config).num_layers, model_shape(config, "critic").num_layers) == (2, 1)
    assert model_shape(config, "reference") == model_shape(config)
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
        "model.hf_config: model '/no/config.json' is neither a preset nor a config.json"
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
        assert problem.startswith(f"model.hf_config={given} must be a file to convert model.gguf=")


def test_model_shape_without_a_model(tmp_path: Path, from_checkpoint: Path) -> None:
    config = load_config(from_checkpoint)
    without = config.model_copy(update={"model": config.model.model_copy(update={"path": None})})
    with pytest.raises(ConfigError, match="given by none of path, gguf and build"):
        model_shape(without)


def test_a_built_model_has_the_shape_that_its_section_says(built: Path) -> None:
    shape = model_shape(load_config(built, ["model.build.family=qwen2"]))
    assert (shape.family, shape.qkv_bias, shape.qk_norm) == ("qwen2", True, False)
    shape = model_shape(load_config(built, ["model.build.family=llama", "model.build.tied_embeddings=false"]))
    assert (shape.family, shape.qkv_bias, shape.tied_embeddings) == ("llama", False, False)
    shape = model_shape(load_config(built))
    assert (shape.family, shape.qk_norm, shape.vocab_size, shape.head_dim) == ("qwen3", True, 57, 32)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.max_positions) == (4, 4, 2, 128)
