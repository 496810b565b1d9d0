"""A run in an environment of several turns, whose episodes another program plays (`hybridengine episodes serve`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.report.step_rows import read_rows

pytestmark = pytest.mark.timeout(600)

COMMAND = (sys.executable, "-m", "hybridengine.cli.main")
ROOT = Path(__file__).parents[2]
START_S, STEPS, SAMPLES, PROMPTS, TURNS = 300, 1, 2, 4, 3
MODULE = f"""
import json, os
import gymnasium

TEXT = gymnasium.spaces.Text(1000, charset="abcdefghijklmnopqrstuvwxyz0123456789 ")

class Digits(gymnasium.Env):
    action_space = observation_space = TEXT

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turns, self.seed = [], seed
        return f"write digits {{seed}}", {{}}

    def step(self, action):
        self.turns.append(action)
        ended = len(self.turns) == {TURNS}
        if ended:
            with open(os.environ["PLAYED_FILE"], "a") as file:
                file.write(json.dumps([os.getpid(), self.seed, self.turns]) + "\\n")
        return "more", float(sum(map(str.isdigit, action))), ended, False, {{}}

gymnasium.register("Digits-v0", Digits, disable_env_checker=True)
"""
CONFIG: dict[str, Any] = {
    "base": str(ROOT / "configs/grpo.yaml"),
    "run": {"steps": STEPS, "eval_every": 0, "name": "digits"},
    "cluster": {"ranks_per_node": [2]},
    "model": {"build": {"max_positions": 128}},
    "actor": {"parallel": "1-2-1", "generate": "1-2", "mini_batches": 1},
    "reference": {"parallel": "1-2-1"},
    "data": {
        "task": None,
        "batch_size": PROMPTS,
        "environment": {
            "name": "gymnasium/digits:Digits-v0",
            "settings": {"max_tokens": 12},
            "train_rows": PROMPTS,
            "eval_rows": 1,
        },
    },
    "warmup": None,
    "rollout": {
        "max_prompt_tokens": 32,
        "max_response_tokens": 64,
        "samples_per_prompt": SAMPLES,
        "kv_cache_bytes": "16MiB",
        "episode": {"metrics": ["steps"], "deadline_s": 300},
    },
    "reward": {"kind": "episode"},
    "checkpoint": {"every": 0},
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "digits.py").write_text(MODULE)
    places = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": places, "PLAYED_FILE": str(tmp_path / "played.jsonl")}


@pytest.fixture
def address(tmp_path: Path, environment: dict[str, str]) -> Iterator[str]:
    """Return the address of a process that plays the episodes of the run."""
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "key").write_text("0123456789abcdef")
    arguments = ("episodes", "serve", "digits.yaml", "--port", "0", "--key-file", "key")
    with (
        (tmp_path / "host.log").open("w") as log,
        subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as host,
    ):
        assert host.stdout is not None
        try:
            said = host.stdout.readline()
            yield said.partition(";")[0].rpartition(" ")[2]
        finally:
            host.terminate()


def test_rewards_are_those_of_episodes_that_another_program_plays(
    tmp_path: Path, environment: dict[str, str], address: str
) -> None:
    overrides = (f"rollout.episode.addresses=[{address}]", "rollout.episode.key_file=key")
    done = subprocess.run(
        [*COMMAND, "train", "digits.yaml", "run.folder=runs", *overrides],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stdout
    row = next(row for row in read_rows(tmp_path / "runs/digits") if "reward/mean" in row)
    seeds = [
        json.loads(line)["answer"]["seed"] for line in (tmp_path / "runs/digits/data/train.jsonl").open()
    ]
    lines = [json.loads(line) for line in (tmp_path / "played.jsonl").read_text().splitlines()]
    (pid,) = {one[0] for one in lines}  # one process, which is gone with its rank
    assert not Path(f"/proc/{pid}").exists()
    played = [one for one in lines if one[1] in seeds]  # others are held-out
    assert sorted(one[1] for one in played) == sorted(seeds * SAMPLES)
    digits = [sum(character.isdigit() for turn in one[2] for character in turn) for one in played]
    assert row["reward/mean"] == row["episode/reward_mean"] == pytest.approx(sum(digits) / len(digits))
    assert row["episode/steps_mean"] == row["episode/turns_mean"] == TURNS
    assert row["episode/failed_share"] == 0.0
