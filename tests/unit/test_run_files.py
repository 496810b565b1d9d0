"""Checkpoints, tokenizers and rows that a run cannot use: one message names them before anything starts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from hybridengine.config import load_config
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.training.files import RunFiles, stop_token_ids
from tests.gloo.tiny_models import write_model
from tests.unit.run_bench import ROWS, Bench, copy_checkpoint


def test_truncated_checkpoint(bench: Bench, checkpoint: Path):
    weights = copy_checkpoint(bench, checkpoint) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"{weights} is not a whole safetensors file" in bench.refusal()


def test_checkpoint_without_weights(bench: Bench, checkpoint: Path):
    (copy_checkpoint(bench, checkpoint) / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in bench.refusal()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"num_hidden_layers": 4}, ["11 tensors (", "described by", "not stored"]),
        (
            {"intermediate_size": 100},
            ["shapes differ from", "mlp.down_proj.weight is [64, 96], not [64, 100]"],
        ),
    ],
)
def test_config_that_disagrees_with_the_checkpoint(
    bench: Bench, checkpoint: Path, changes: dict[str, Any], parts: list[str]
):
    config = copy_checkpoint(bench, checkpoint) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    message = bench.refusal()
    for part in parts:
        assert part in message


@pytest.mark.parametrize(("named", "more"), [(None, []), (5, [5]), ([5, 6, 5], [5, 6]), ([], [])])
def test_a_response_ends_where_the_checkpoint_says(
    tmp_path: Path, named: int | list[int] | None, more: list[int]
):
    tokenizer = build_arithmetic_tokenizer()
    if named is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert stop_token_ids(tmp_path, tokenizer, 57) == (tokenizer.eos_token_id, *more)
    # As Qwen2.5-7B, whose template ends turns with <|im_end|>.
    tokenizer.eos_token = "<|pad|>"
    assert stop_token_ids(tmp_path, tokenizer, 57) == (
        0,
        *more,
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    tokenizer.chat_template = "{{ messages[-1].content }}"
    assert stop_token_ids(tmp_path, tokenizer, 57) == (0, *more)


def test_episodes_are_warned_of_a_template_that_lets_no_message_follow(bench: Bench) -> None:
    overrides = ["rollout.episode.function=tries:two_tries", "reward.kind=episode"]
    tokenizer = build_arithmetic_tokenizer()
    files: Any = RunFiles(tokenizer, None, None, None, ())  # type: ignore[arg-type]
    bench.config.write_text(yaml.safe_dump(bench.sections))
    with_episodes = load_config(str(bench.config), overrides, dry_run=True)
    assert files.data_lines(with_episodes) == []
    tokenizer.chat_template = "{{ messages[-1].content }}"
    (line,) = files.data_lines(with_episodes)
    assert "warning: client.add cannot add messages: the chat template does not repeat" in line
    assert files.data_lines(load_config(str(bench.config), [], dry_run=True)) == []


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[1]", "is not accepted by transformers ("),
        ("[" * 2000, "is not accepted by transformers (maximum recursion depth"),
        ("{broken", "is not a valid JSON file"),
        (
            '{"eos_token_id": "abc"}',
            'eos_token_id has "abc", which is not a token from 0 to 130',
        ),
        ('{"eos_token_id": [3, 131]}', "eos_token_id has 131, which is not a token"),
        ('{"eos_token_id": -1}', "eos_token_id has -1, which is not a token"),
        ('{"eos_token_id": true}', "eos_token_id has true, which is not a token"),
    ],
)
def test_a_generation_config_that_names_no_tokens(bench: Bench, checkpoint: Path, content: str, part: str):
    file = copy_checkpoint(bench, checkpoint) / "generation_config.json"
    file.write_text(content)
    message = bench.refusal()
    assert f"hybridengine: {file}" in message
    assert part in message
    assert message.endswith("; restore the model's original file, or remove it\n")


@pytest.mark.parametrize("named", ["abc", 131, [1, -1]])
def test_a_config_that_names_no_end_token(
    bench: Bench, checkpoint: Path, named: Any, monkeypatch: pytest.MonkeyPatch
):
    # transformers warns of the value before it is refused; the warning is not the message looked for.
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [logging.NullHandler()])
    file = copy_checkpoint(bench, checkpoint) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": named}))
    message = bench.refusal()
    assert f"hybridengine: {file} is not accepted by transformers (" in message and "eos_token_id" in message


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([*ROWS[:2], "{broken", *ROWS], ["train.jsonl, line 3", "is not JSON"]),
        ([*ROWS, {"prompt": "1 + 1 ="}], ["train.jsonl, line 17", "answer is missing"]),
        (
            [*ROWS, {"prompt": 5, "answer": "5"}, '"text"'],
            ["2 problems", "line 17", "line 18", "prompt=5 must be a string"],
        ),
        ([], ["train.jsonl has no rows"]),
        (
            [*ROWS, {"prompt": "1 + " * 9 + "1 =", "answer": "10"}],
            ["line 17: the prompt has", "max_prompt_tokens=16"],
        ),
        ([*ROWS, {"prompt": "1 § 2 =", "answer": "3"}], ["line 17", "unknown to the tokenizer"]),
    ],
    ids=["not-json", "key-missing", "wrong-types", "empty", "too-long", "unknown-characters"],
)
def test_malformed_data(bench: Bench, rows: list[Any], parts: list[str]):
    bench.write_rows(rows)
    message = bench.refusal()
    for part in parts:
        assert part in message


def test_problems_of_several_files_are_one_list(bench: Bench):
    bench.write_rows([*ROWS, {"prompt": 5, "answer": "5"}, '"text"'])
    other = bench.data.with_name("eval.jsonl")
    other.write_text(bench.data.read_text())
    message = bench.refusal(f"data.eval_file={other}")
    assert "hybridengine: 4 problems:" in message and message.count("problems:") == 1
    assert f"  3. {other}, line 17" in message


def test_tokenizer_without_special_tokens(bench: Bench):
    whole = build_arithmetic_tokenizer()
    folder = bench.folder / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=whole.backend_tokenizer).save_pretrained(folder)
    message = bench.refusal(f"model.tokenizer={folder}")
    for part in ("eos_token=None", "no chat template", "tokenizer_config.json"):
        assert part in message


def test_tokenizer_larger_than_the_models_vocabulary(bench: Bench, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("narrow")
    write_model(folder, "qwen3", tied=True, head_dim=32, vocab_size=40)
    build_arithmetic_tokenizer().save_pretrained(folder)
    message = bench.refusal(f"model.path={folder}")
    assert "has vocab_size=40, the actor's tokenizer" in message
