"""Configurations with an environment, and the files of its prompts, which a process of its own writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridengine.config import RunConfig, check_run, load_config
from hybridengine.config.environment_section import EPISODE_FUNCTION
from hybridengine.environments.environment import Prompt, load_environment
from hybridengine.environments.files import write_environment_files
from hybridengine.errors import ConfigError, DataError
from tests.unit.byte_episodes import play

ROOT = Path(__file__).parents[2]
CHAINS: dict[str, Any] = {
    "name": "reasoning_gym/chain_sum",
    "options": {"max_terms": 3},
    "settings": {"tries": 2},
    "train_rows": 40,
    "eval_rows": 8,
    "seed": 5,
}


def config_with(folder: Path, environment: dict[str, Any], *overrides: str, **sections: Any) -> RunConfig:
    described = {
        "base": str(ROOT / "configs/grpo.yaml"),
        "run": {"folder": str(folder), "name": "run"},
        "data": {"task": None, "environment": environment, "batch_size": 8},
        "warmup": None,
        "reward": {"kind": "episode", "function": None},
        **sections,
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(described))
    return load_config(file, overrides)


def problems(folder: Path, environment: dict[str, Any], *overrides: str, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_with(folder, environment, *overrides, **sections)
    return str(caught.value)


def test_a_run_plays_its_environment(tmp_path: Path) -> None:
    config = config_with(tmp_path, CHAINS, "rollout.episode.metrics=[tries]")
    assert check_run(config) == []
    episode = config.rollout.episode
    assert episode is not None
    assert (episode.function, episode.metrics) == (EPISODE_FUNCTION, ("tries",))
    assert episode.options == {"environment": {key: CHAINS[key] for key in ("name", "options", "settings")}}
    assert config.eval_file == tmp_path / "run/data/held_out.jsonl"
    again = RunConfig.model_validate(config.described())
    assert again.rollout.episode == episode


@pytest.mark.parametrize(
    ("environment", "overrides", "text"),
    [
        ({"name": "reasoning_gim/chain_sum"}, [], "did you mean reasoning_gym/chain_sum?"),
        ({"name": "chain_sum"}, [], "is not KIND/NAME with a KIND of reasoning_gym, verifiers, gymnasium"),
        (
            CHAINS,
            ["reward.kind=function", "reward.function=a:b"],
            "which nothing reads; add reward.kind=episode",
        ),
        (CHAINS, ["rollout.episode.function=a:b"], "rollout.episode.function=a:b is not called"),
        (CHAINS, ["data.eval_file=x.jsonl"], "since data.environment generates the held-out rows"),
        (CHAINS, ["data.train_file=x.jsonl"], "found train_file and environment"),
        (CHAINS, ["rollout.episode.addresses=[a:1]"], "name its file in rollout.episode.key_file"),
        (CHAINS, ["rollout.episode.addresses=[a]"], "must be HOST:PORT"),
        (CHAINS, ["rollout.episode.python=python"], "must be an absolute path"),
        (
            CHAINS,
            ["rollout.episode.addresses=[a:1]", "rollout.episode.key_file=k", "rollout.episode.python=/p"],
            "rollout.episode.python=/p is not used",
        ),
        ({**CHAINS, "train_row": 4}, [], "did you mean data.environment.train_rows?"),
    ],
)
def test_contradictions(tmp_path: Path, environment: Any, overrides: list[str], text: str) -> None:
    assert text in problems(tmp_path, environment, *overrides)


def test_an_episode_needs_a_function_or_an_environment(tmp_path: Path) -> None:
    task = {"task": {"name": "arithmetic"}, "batch_size": 8}
    found = problems(tmp_path, CHAINS, data=task, rollout={"episode": {"max_turns": 2}})
    assert "rollout.episode.function is missing, and there is no data.environment" in found


def test_files_have_the_environments_prompts(tmp_path: Path) -> None:
    config = config_with(tmp_path, CHAINS)
    files = write_environment_files(config)
    rows = {
        name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()
    }
    assert {name: len(some) for name, some in rows.items()} == {"train": 40, "held_out": 8}
    assert files == {"train": config.train_file, "held_out": config.eval_file}
    environment = load_environment(*(CHAINS[key] for key in ("name", "options", "settings")))
    expected = [
        {"prompt": one.prompt, "answer": one.answer} for one in environment.prompts(CHAINS["seed"], 48 * 50)
    ]
    found = [*rows["held_out"], *rows["train"]]
    assert len({row["prompt"][0]["content"] for row in found}) == 48
    assert all(row in expected for row in found)


@pytest.mark.parametrize("dataset", ["polynomial_multiplication", "isomorphic_strings", "codeio"])
def test_problems_are_the_same_whenever_they_are_written_and_wherever_they_are_played(
    tmp_path: Path, dataset: str
) -> None:
    """The first two draw from sets, whose order differs between processes, and the third from NumPy's generator."""
    described = {"name": f"reasoning_gym/{dataset}", "train_rows": 20, "eval_rows": 20}
    written = [
        [file.read_text() for file in write_environment_files(config_with(tmp_path, described)).values()]
        for _ in range(2)
    ]
    assert written[0] == written[1]
    environment = load_environment(described["name"], {}, {})
    rows = [json.loads(line) for text in written[0] for line in text.splitlines()]
    prompts = [Prompt(row["prompt"], row["answer"], "") for row in rows]
    rewards = [play(environment, one, one.answer["answer"])[0].reward for one in prompts]
    assert rewards == [1.0] * 40


MODULE = """
import socket, time
import gymnasium

class Stuck(gymnasium.Env):
    action_space = gymnasium.spaces.Text(8)
    observation_space = gymnasium.spaces.Text(8)

    def reset(self, seed=None, options=None):
        if self.how == "sleeps":
            time.sleep(600)
        if self.how == "connects":
            try:
                socket.create_connection(("127.0.0.1", 9), 1)
            except OSError as error:
                raise RuntimeError("no model file") from error
        if self.how == "exits":
            raise SystemExit(3)
        return "?", {}

    def __init__(self, how):
        self.how = how

gymnasium.register("Stuck-v0", Stuck)
"""


@pytest.mark.parametrize(
    ("how", "limit_s", "text"),
    [
        ("sleeps", 8, "did not write its prompts within 8 s; it may wait for the network"),
        (
            "connects",
            300,
            r"raised RuntimeError: no model file while it wrote its prompts \(it wants the network",
        ),
        ("exits", 300, "raised SystemExit: 3 while it wrote its prompts"),
    ],
)
def test_an_environment_that_does_not_write_its_prompts_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, limit_s: int, text: str
) -> None:
    (tmp_path / "stuck_environment.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    named = {"name": "gymnasium/stuck_environment:Stuck-v0", "options": {"how": how}}
    config = config_with(tmp_path, named, f"timeouts.start_s={limit_s}")
    with pytest.raises(DataError, match=f"data.environment.name={named['name']} {text}"):
        write_environment_files(config)


def test_another_python_is_used_and_a_missing_one_named(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    write_environment_files(config_with(tmp_path, CHAINS, f"rollout.episode.python={script}"))
    assert (tmp_path / "used").exists()
    with pytest.raises(
        DataError, match=r"the Python /no/python of user code cannot be started \(No such file"
    ):
        write_environment_files(config_with(tmp_path, CHAINS, "rollout.episode.python=/no/python"))
