"""A server that the session shares, on a model that `hybridengine train` has warmed up on the recipes' questions."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.clients.servers import CLIENT_PYTHON, Server, run_command
from tests.clients.warm_model import NAME, write_datasets, write_demonstrations, write_random_model


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the small model on the demonstrations; return the folder of its checkpoint."""
    assert CLIENT_PYTHON.exists(), f"{CLIENT_PYTHON} does not exist; run `make test-clients`"
    folder = tmp_path_factory.mktemp("warm")
    write_random_model(folder / "random")
    write_demonstrations(folder / "demonstrations.jsonl")
    sections = {
        "run": {"name": "warm", "folder": str(folder / "runs"), "steps": 1, "eval_every": 0, "live": False},
        "cluster": {"ranks_per_node": [2]},
        "model": {"path": str(folder / "random")},
        "data": {"train_file": str(folder / "demonstrations.jsonl"), "batch_size": 2},
        "warmup": {
            "file": str(folder / "demonstrations.jsonl"),
            "steps": 120,
            "batch_size": 128,
            "lr": 3e-3,
        },
        "actor": {"parallel": "1-1-2", "generate": "1-1", "micro_batch_tokens": 8192},
        "reference": {"parallel": "1-1-2"},
        "reward": {"function": "hybridengine.data.tasks:arithmetic_reward"},
        "rollout": {
            "max_prompt_tokens": 36,
            "max_response_tokens": 5,
            "samples_per_prompt": 2,
            "kv_cache_bytes": "16MiB",
        },
        "algorithm": {"name": "grpo"},
        "checkpoint": {"every": 0},
    }
    (folder / "warm.yaml").write_text(yaml.safe_dump(sections))
    run_command("train", folder / "warm.yaml")
    return folder / "runs/warm/final"


@pytest.fixture(scope="session")
def server(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the warmed-up model on two ranks."""
    server = Server(tmp_path_factory.mktemp("server"), warm_model)
    try:
        server.start()
        yield server
    finally:
        status = server.stop()
    assert status == 128 + signal.SIGTERM, server.log.read_text()


@pytest.fixture(scope="session")
def client_folder(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the recipes find tokenizer and data sets under their names on the Hugging Face Hub."""
    folder = tmp_path_factory.mktemp("client")
    (folder / NAME).parent.mkdir()
    (folder / NAME).symlink_to(warm_model)
    write_datasets(folder)
    return folder
