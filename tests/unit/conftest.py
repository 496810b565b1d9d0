"""Fixtures that several tests share: valid configurations, a checkpoint, a run on it, the command that plans a switch,
and signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from hybridengine.cli.main import main
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.launch.stopping import SIGNALS
from tests.gloo.tiny_models import write_model
from tests.unit.plan_runs import H100, Plan
from tests.unit.run_bench import Bench, Reached
from tests.unit.test_checkpoint_files import write_checkpoint

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
    """1 rank, the small checkpoint of the checkpoint tests, a training file that is not read."""
    write_checkpoint(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text("")
    path = tmp_path / "run.yaml"
    text = FROM_CHECKPOINT.replace("MODEL", str(tmp_path / "model"))
    path.write_text(text.replace("TRAIN", str(tmp_path / "train.jsonl")))
    return path


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Return a function that runs the command and returns (exit code, stdout, stderr)."""

    def run(*arguments: str, model: str = "llama3-8b", cluster: str = H100) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["reshard", "plan", "--model", model, "--cluster", cluster, *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Ray does not run in this process; a test of tests/full may have started it."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with a tokenizer. Tests that break it copy what they break."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_model(folder, "qwen3", tied=True, head_dim=32)
    build_arithmetic_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def bench(
    tmp_path: Path,
    checkpoint: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    def start(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.setattr("hybridengine.training.launch.start_ray", start)
    return Bench(tmp_path, checkpoint, capfd)


@pytest.fixture
def signals() -> Iterator[None]:
    """Keep this process's handlers of the signals that a node handles."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
