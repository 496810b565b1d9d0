"""The algorithm of docs/how-to/algorithm.md and the pools of docs/how-to/pools.md, taken from the pages."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from tensordict import TensorDict

from hybridengine.algorithms.across import ONE_PROCESS
from hybridengine.config import load_config
from hybridengine.config.algorithm import ALGORITHMS, algorithm_class
from hybridengine.drivers.dataflow import check_functions
from hybridengine.planning.costs.dataflows import calls_of

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/explanation/algorithms.md").read_text()
EXAMPLE = (ROOT / "docs/how-to/algorithm.md").read_text()
POOLS = (ROOT / "docs/how-to/pools.md").read_text()
BASE = ROOT / "configs/arithmetic.yaml"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Write the page's files next to a folder `configs`, and import the module."""
    (tmp_path / "my_dataflows").mkdir()
    (tmp_path / "my_dataflows/running_baseline.py").write_text(blocks(EXAMPLE, "python")[1])
    (tmp_path / "running-baseline.yaml").write_text(blocks(EXAMPLE, "yaml")[0])
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("my_dataflows.running_baseline")


def test_the_example_is_a_configuration_with_a_dataflow(module: ModuleType) -> None:
    config = load_config("running-baseline.yaml")
    algorithm: Any = config.algorithm
    assert type(algorithm) is module.RunningBaseline
    assert (algorithm.roles, algorithm.decay) == (("actor", "reference", "reward"), 0.8)
    check_functions(algorithm)
    assert [str(call) for call in calls_of(algorithm, 5, 3)] == [
        str(call) for call in calls_of(algorithm_class("rloo")(), 5, 3)
    ]


def test_the_examples_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(blocks(EXAMPLE, "python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    check_functions(load_config(ROOT / "configs/grpo.yaml", ["algorithm.loss=my_losses:reinforce"]).algorithm)


def test_the_examples_advantages(module: ModuleType) -> None:
    lengths, scores, dropped = [3, 1, 0, 2], [1.0, 0.25, 0.5, float("nan")], [False, False, False, True]
    zeros = torch.zeros(4, 3)
    rows = TensorDict(
        dict.fromkeys(("log_probs", "ref_log_probs", "rollout_log_probs"), zeros)
        | {
            "response_lengths": torch.tensor(lengths),
            "scores": torch.tensor(scores),
            "dropped": torch.tensor(dropped),
        },
        batch_size=[4],
    )
    algorithm = load_config("running-baseline.yaml").algorithm
    found = module.advantages(rows, ONE_PROCESS, algorithm, 1, 0.5)
    assert found["advantages"].tolist() == [[0.5] * 3, [-0.25, 0, 0], [0.0] * 3, [0.0] * 3]
    assert found["keep"].tolist() == [True, True, True, False]


def test_the_pages_pools_are_a_configuration(tmp_path: Path) -> None:
    sections = yaml.safe_load(BASE.read_text()) | yaml.safe_load(blocks(POOLS, "yaml")[0])
    sections["actor"] = {"parallel": "2-2-1", "generate": "1-1"}
    (tmp_path / "pools.yaml").write_text(yaml.safe_dump(sections))
    config = load_config(tmp_path / "pools.yaml")
    assert [pool.num_ranks for pool in config.pools.values()] == [4, 2, 2]


def test_the_page_names_every_dataflow() -> None:
    for name in ALGORITHMS:
        row = next(line for line in TABLE.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| {', '.join(algorithm_class(name).roles)} |" in row
        config = re.search(r"`(configs/[\w.-]+)`", row)
        assert config is not None
        assert load_config(ROOT / config[1], dry_run=True).algorithm.name == name
