"""SmolLM2-135M through `hybridengine convert`, to a checkpoint of a run and back: bits, memory, and who can load it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridengine.backends.vllm.environment import ON_CPU
from hybridengine.checkpoints.tensors import TensorFolder
from hybridengine.cli.main import main
from hybridengine.config import load_config
from hybridengine.training.files import convert_gguf
from tests.gloo.tiny_models import write_model
from tests.warm_workers import warm_program

pytestmark = pytest.mark.timeout(1000)

ROOT = Path(__file__).parents[3]
CARD = "---\nlicense: apache-2.0\n---\n# A small model\n"
LARGEST_BYTES = 49152 * 576 * 4
"""Bytes of the embedding, a fifth of the model."""
FEW = 3.2
"""Limit of the additional memory, in sizes of the largest tensor."""
TEXTS = ["The capital of France is", "def fibonacci(n):", "1 + 2 + 3 ="]
NUM_TOKENS = 8
CONVERT = """
import sys
from pathlib import Path
from hybridengine.cli.main import main
for arguments in sys.argv[1:]:
    if status := main(["convert", *arguments.split()]):
        sys.exit(status)
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(line.split()[1])
"""

PLAIN_VLLM = """
import json, os, sys
from vllm import LLM, SamplingParams
folder, prompts, num_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
engine = LLM(model=folder, dtype="float32", max_model_len=128, enforce_eager=True, disable_log_stats=True)
asked = [{"prompt_token_ids": prompt} for prompt in prompts]
sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
answers = engine.generate(asked, sampling, use_tqdm=False)
print(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
"""
"""vLLM as its users start it, without anything of this project; prints its greedy responses."""


@dataclass(frozen=True)
class Converted:
    """Folders, and the memory that each direction took beyond that of a tiny model, in bytes."""

    source: Path
    start: Path
    exported: Path
    there_bytes: int
    back_bytes: int


def convert(small: str, large: str, variables: dict[str, str]) -> int:
    """Return the bytes by which the second command's peak memory exceeds the first one's; both run in one process."""
    done = subprocess.run(
        warm_program("-c", CONVERT, small, large),
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, before, after = re.findall(r"^\d+$", done.stdout, re.MULTILINE)
    return 1024 * (int(after) - int(before))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, warm_ray: dict[str, str]) -> Converted:
    folder = tmp_path_factory.mktemp("real")
    config = load_config(ROOT / "configs" / "smollm2.yaml", [f"run.folder={folder}"])
    config.run_folder.mkdir()
    # transformers parses the file twice, and makes the same table of names for every module.
    with (
        mock.patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        convert_gguf(config)
    source = config.model_folder
    (source / "README.md").write_text(CARD)
    write_model(folder / "tiny", "llama", tied=True)
    there = convert(f"{folder}/tiny {folder}/tiny-start", f"{source} {folder}/start", warm_ray)
    back = convert(
        f"{folder}/tiny-start {folder}/tiny-again --companions {folder}/tiny",
        f"{folder}/start {folder}/exported --companions {source} --max-file 200MiB",
        warm_ray,
    )
    return Converted(source, folder / "start", folder / "exported", there, back)


def test_a_round_trip_is_bitwise(converted: Converted) -> None:
    index = json.loads((converted.exported / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) == 3 and all((converted.exported / file).stat().st_size < 201 * 2**20 for file in files)
    with safe_open(converted.source / "model.safetensors", framework="pt") as source:
        assert set(index["weight_map"]) == set(source.keys())
        sizes = [source.get_tensor(name).nbytes for name in index["weight_map"]]
        assert index["metadata"]["total_size"] == sum(sizes)
        for name, file in index["weight_map"].items():
            with safe_open(converted.exported / file, framework="pt") as exported:
                assert torch.equal(exported.get_tensor(name), source.get_tensor(name)), name


def test_a_few_tensors_are_in_memory_at_a_time(converted: Converted) -> None:
    model_bytes = (converted.source / "model.safetensors").stat().st_size
    assert model_bytes > 1.4 * FEW * LARGEST_BYTES, "the bound says something of this model"
    assert converted.there_bytes < FEW * LARGEST_BYTES
    assert converted.back_bytes < FEW * LARGEST_BYTES
    assert len(TensorFolder(converted.start / "actor").shapes) == 272


def test_card_and_tokenizer_come_along(converted: Converted) -> None:
    assert (converted.exported / "README.md").read_text() == CARD
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ):
        assert (converted.exported / name).read_bytes() == (converted.source / name).read_bytes(), name


def test_transformers_and_vllm_load_the_export_and_give_the_same_tokens(
    converted: Converted, tmp_path: Path, warm_ray: dict[str, str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted.exported)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    expected = greedy(converted.exported, prompts)
    assert "Paris" in tokenizer.decode(expected[0])
    (tmp_path / "plain_vllm.py").write_text(PLAIN_VLLM)
    done = subprocess.run(
        warm_program(tmp_path / "plain_vllm.py", converted.exported, json.dumps(prompts), NUM_TOKENS),
        env=os.environ | ON_CPU | warm_ray,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def greedy(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return transformers' greedy responses."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
        found.append(tokens[0, len(prompt) :].tolist())
    return found


def test_code_of_a_model_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder brings its own classes, which transformers would import if it were trusted."""
    write_model(tmp_path / "model", "llama", tied=True)
    ran = tmp_path / "ran"
    (tmp_path / "model" / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    for name in ("config.json", "tokenizer_config.json"):
        file = tmp_path / "model" / name
        described = json.loads(file.read_text()) if file.exists() else {}
        own = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", None]}
        file.write_text(json.dumps(described | {"auto_map": own}))
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "start")]) == 0
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 8)
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{train_file: {tmp_path / 'rows.jsonl'}, batch_size: 8}}\n"
        f"run: {{folder: {tmp_path / 'runs'}, steps: 1}}\n"
    )
    assert main(["train", str(tmp_path / "run.yaml")]) == 2  # the tokenizer is in the model's own code
    assert "is code of its own, which is never run here" in capsys.readouterr().err
    assert not ran.exists()
