"""Ranks with verl; a small model that answers a few questions, and verl's own trainer on it by the documented command."""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import pytest

from tests.clients.servers import ROOT, run_command
from tests.clients.warm_model import warm_up
from tests.gloo.ranks import RankLauncher

# Read when verl is imported, by this process and by its ranks.
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_VENDOR": "hybridengine"}
COMMAND_S = 900  # machines are shared
REWARD = '''"""The answer is the number alone."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(solution_str.replace("<|im_end|>", "").strip() == ground_truth)
'''


@dataclass(frozen=True)
class Trial:
    """Model, data and reward of the tests' runs."""

    folder: Path
    model: Path

    def run(self, name: str, *overrides: str) -> tuple[list[dict[str, Any]], str]:
        """Run the documented command with more overrides; return (metrics of each step, output)."""
        page = (ROOT / "docs/how-to/verl.md").read_text()
        command = re.findall(r"```sh\n(export VERL_ENGINE_VENDOR.*?)```", page, re.DOTALL)[0].rstrip()
        metrics = self.folder / f"{name}.jsonl"
        done = subprocess.run(
            ["bash", "-euc", " ".join([command, "trainer.logger=[console,file]", *overrides])],
            cwd=ROOT,
            env=os.environ
            | {
                "MODEL": str(self.model),
                "DATA": str(self.folder / "train.parquet"),
                "REWARD": str(self.folder / "reward.py"),
                "SAVED": str(self.folder / "saved"),
                "PYTHONPATH": str(ROOT),
                "VERL_FILE_LOGGER_PATH": str(metrics),
                "HF_HUB_OFFLINE": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, done.stdout[-20_000:]
        return [json.loads(line)["data"] for line in metrics.read_text().splitlines()], done.stdout


@pytest.fixture(scope="session")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Warm a model up on demonstrations, and write their questions in verl's format."""
    folder = tmp_path_factory.mktemp("verl")
    model = warm_up(folder, run_command)
    demonstrations = map(json.loads, (folder / "demonstrations.jsonl").read_text().splitlines())
    rows = {
        one["prompt"][-1]["content"]: {
            "data_source": "arithmetic",
            "prompt": one["prompt"],
            "reward_model": {"style": "rule", "ground_truth": one["answer"]},
        }
        for one in demonstrations
        if "boxed" not in one["prompt"][-1]["content"]
    }
    pandas.DataFrame(list(rows.values())).to_parquet(folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    return Trial(folder, model)


@pytest.fixture(scope="session")
def run_ranks() -> RankLauncher:
    """Override the fixture of all tests with ranks that are forks of a process with verl."""
    return RankLauncher(("tests.verl.engine_ranks",))
