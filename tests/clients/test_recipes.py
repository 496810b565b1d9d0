"""Recipes of tinker-cookbook, unmodified, train the served model: rewards rise, losses fall."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.clients.servers import CLIENT_PYTHON, Server
from tests.clients.warm_model import NAME

pytestmark = pytest.mark.timeout(1800)

ARITHMETIC = {
    "env": "arithmetic",
    "renderer_name": "qwen3_instruct",
    "group_size": 8,
    "groups_per_batch": 8,
    "max_tokens": 5,
    "max_steps": 6,
    "eval_every": 0,
    "save_every": 0,
    "learning_rate": 1e-3,
}


def metrics_of(
    server: Server, folder: Path, logs: Path, recipe: str, **options: object
) -> list[dict[str, Any]]:
    """Run a recipe, and return the lines of its metrics.jsonl."""
    log = logs / "log"  # recipes ask what to do with a folder that exists
    options |= {"model_name": NAME, "lora_rank": 0, "base_url": server.url, "log_path": log}
    server.client(
        "-m",
        f"tinker_cookbook.recipes.{recipe}",
        *(f"{key}={value}" for key, value in options.items()),
        cwd=folder,
    )
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def rewards_of(metrics: list[dict[str, Any]]) -> list[float]:
    return [line["env/all/reward/total"] for line in metrics if "env/all/reward/total" in line]


@pytest.mark.parametrize(
    "options",
    [
        {"loss_fn": "importance_sampling"},
        {"loss_fn": "ppo", "num_substeps": 2, "compute_post_kl": True},
        {"loss_fn": "importance_sampling", "max_steps_off_policy": 1},
    ],
    ids=["on-policy", "ppo", "off-policy"],
)
def test_the_reward_of_math_rl_rises(
    server: Server, client_folder: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    metrics = metrics_of(server, client_folder, tmp_path, "math_rl.train", **ARITHMETIC, **options)
    rewards = rewards_of(metrics)
    assert len(rewards) == 6
    assert 0.2 < rewards[0] < 0.75
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.2, rewards


def test_an_off_policy_recipe_samples_on_engines_while_the_actor_trains(
    warm_model: Path, client_folder: Path, tmp_path: Path
) -> None:
    calls = tmp_path / "calls.jsonl"
    pools = {"engines": {"roles": ["generation"], "ranks_per_node": [1]}}
    server = Server(
        tmp_path, warm_model, cluster={"pools": pools}, serve={"model_name": NAME, "calls_file": str(calls)}
    )
    options = ARITHMETIC | {"loss_fn": "importance_sampling", "max_steps_off_policy": 2}
    try:
        server.start()
        rewards = rewards_of(metrics_of(server, client_folder, tmp_path, "math_rl.train", **options))
    finally:
        assert server.stop() == 128 + signal.SIGTERM, server.log.read_text()
    assert len(rewards) == 6
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.2, rewards
    spans: dict[str, list[tuple[float, float]]] = {}
    for call in map(json.loads, calls.read_text().splitlines()):
        spans.setdefault(call["call"], []).append((call["begin_s"], call["end_s"]))
    assert "actor.sample" not in spans
    both = [
        min(end, end_of) - max(begin, begin_of)
        for begin, end in spans["generation.sample"]
        for begin_of, end_of in spans["actor.pass_rows"] + spans["actor.step_with"]
    ]
    assert max(both) > 0, spans


def test_the_loss_of_chat_sl_falls(server: Server, client_folder: Path, tmp_path: Path) -> None:
    metrics = metrics_of(
        server,
        client_folder,
        tmp_path,
        "chat_sl.train",
        dataset=example_conversations(),
        renderer_name="qwen3_instruct",
        batch_size=4,
        max_length=128,
        learning_rate=1e-3,
        max_steps=12,
        save_every=0,
        eval_every=0,
    )
    assert_falling([line["train_mean_nll"] for line in metrics if "train_mean_nll" in line], 12)


def example_conversations() -> Path:
    """Return the conversations that come with the cookbook."""
    (package,) = CLIENT_PYTHON.parents[1].glob("lib/python*/site-packages/tinker_cookbook")
    return package / "example_data/conversations.jsonl"


def assert_falling(losses: list[float], num_steps: int) -> None:
    assert len(losses) == num_steps
    third = num_steps // 3
    assert sum(losses[-third:]) < 0.9 * sum(losses[:third]), losses


def test_the_loss_of_sl_loop_falls(server: Server, client_folder: Path, tmp_path: Path) -> None:
    """It leaves its session open, as rl_loop does: the next client's model waits until the heartbeats are old."""
    metrics = metrics_of(
        server, client_folder, tmp_path, "sl_loop", batch_size=8, learning_rate=1e-3, max_steps=6
    )
    assert_falling([line["train_mean_nll"] for line in metrics if "train_mean_nll" in line], 6)


def test_the_reward_of_rl_loop_rises(server: Server, client_folder: Path, tmp_path: Path) -> None:
    metrics = metrics_of(
        server,
        client_folder,
        tmp_path,
        "rl_loop",
        loss_fn="importance_sampling",
        batch_size=8,
        group_size=8,
        max_tokens=8,
        learning_rate=1e-3,
        max_steps=6,
    )
    rewards = [line["reward/total"] for line in metrics if "reward/total" in line]
    assert len(rewards) == 6
    assert sum(rewards[-2:]) > sum(rewards[:2]), rewards
