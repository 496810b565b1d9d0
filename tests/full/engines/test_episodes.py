"""Episodes of an actor on real ranks: two engines of two ranks each, without Ray."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedModel

from hybridengine.config import load_config
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.episodes.wire import FAILURES
from hybridengine.rollouts.drawn import ADDED, CUT, STOPPED
from tests.full.engines.episode_ranks import draw_episodes
from tests.full.engines.test_workers import SECTIONS, SIZES, TEMPERATURE
from tests.full.engines.worker_ranks import NUM_ROWS, STOP_TOKEN
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def drawn(
    tmp_path_factory: pytest.TempPathFactory, run_ranks: RankLauncher
) -> tuple[list[dict], PreTrainedModel]:
    folder = tmp_path_factory.mktemp("episodes")
    policy = write_model(folder / "policy", "qwen3", tied=True, **SIZES)
    build_arithmetic_tokenizer().save_pretrained(folder / "policy")
    (folder / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    episode = {"function": "tests.full.engines.episode_cases:asks_back", "metrics": ["answer"]}
    sections: dict[str, Any] = SECTIONS | {
        "run": SECTIONS["run"] | {"folder": str(folder / "runs")},
        "model": {"path": str(folder / "policy")},
        "data": SECTIONS["data"] | {"train_file": str(folder / "rows.jsonl")},
        "actor": SECTIONS["actor"] | {"parallel": "1-2-2"},
        "rollout": SECTIONS["rollout"] | {"max_response_tokens": 26, "episode": episode},
        "reward": {"kind": "episode"},
        "algorithm": {"name": "grpo"},
    }
    sections["rollout"]["samples_per_prompt"] = 2
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return run_ranks(4, draw_episodes, load_config(folder / "run.yaml"), folder / "policy"), policy


def test_rows_are_turns_of_the_model_and_what_was_added(drawn: tuple[list[dict], PreTrainedModel]) -> None:
    """Against transformers, and the texts that the function adds."""
    (first, *others), policy = drawn
    rows, tokenizer = first["rows"], build_arithmetic_tokenizer()
    assert all(torch.equal(one["rows"]["tokens"], rows["tokens"]) for one in others)
    prompts = rollout_of_prompts(rows)
    for row in range(NUM_ROWS):
        begin, length = len(prompts[row]), int(rows["response_lengths"][row])
        tokens = rows["tokens"][row, : begin + length]
        assert tokens[:begin].tolist() == prompts[row]
        turns, place, expected = 1 + row % 3, 0, []
        response = tokens[begin:].tolist()
        for turn in range(turns):
            if turn:
                added = tokenizer(f"{len(expected[-1])}+{turn}=", add_special_tokens=False)["input_ids"]
                assert response[place : place + len(added)] == added
                assert not rows["response_mask"][row, place : place + len(added)].any()
                place += len(added)
            size = next(
                (n for n, token in enumerate(response[place : place + 3 + turn], 1) if token == STOP_TOKEN),
                3 + turn,
            )
            expected.append(response[place : place + size])
            assert rows["response_mask"][row, place : place + size].all()
            place += size
        assert place == length
        assert not rows["response_mask"][row, length:].any()
        with torch.no_grad():
            logits = policy(tokens[None]).logits[0, begin - 1 : -1] / TEMPERATURE
        own = logits.log_softmax(-1).gather(1, tokens[begin:, None])[:, 0]
        mask = rows["response_mask"][row, :length]
        torch.testing.assert_close(
            rows["rollout_log_probs"][row, :length][mask], own[mask], atol=1e-4, rtol=0
        )
        torch.testing.assert_close(rows["log_probs"][row, :length][mask], own[mask], atol=1e-4, rtol=0)


def rollout_of_prompts(rows: Any) -> list[list[int]]:
    return [
        tokens[:length].tolist()
        for tokens, length in zip(rows["prompt_tokens"], rows["prompt_lengths"], strict=True)
    ]


def test_outcomes_are_columns(drawn: tuple[list[dict], PreTrainedModel]) -> None:
    rows = drawn[0][0]["rows"]
    failed = [0] * NUM_ROWS
    failed[5] = 1 + [*FAILURES].index("raised")
    assert rows["episode/failure"].tolist() == failed
    turns = [1 + row % 3 for row in range(NUM_ROWS)]
    assert rows["episode/turns"].tolist() == turns
    for name, values in (("reward", turns), ("answer", range(NUM_ROWS))):
        found = rows[f"episode/{name}"].tolist()
        assert math.isnan(found.pop(5))
        assert found == [float(value) for row, value in enumerate(values) if row != 5]


def test_interrupted_episodes_are_those_that_were_not(drawn: tuple[list[dict], PreTrainedModel]) -> None:
    """Each engine draws all rows in calls of a few steps; after every third call, all begin again with their turns."""
    results = drawn[0]
    rows = results[0]["rows"]
    for result in results:
        for number, rollout in result["interrupted"].items():
            begin, length = int(rows["prompt_lengths"][number]), int(rows["response_lengths"][number])
            assert rollout.tokens == rows["tokens"][number, begin : begin + length].tolist()
            assert rollout.trained == rows["response_mask"][number, :length].tolist()
            log_probs = rows["rollout_log_probs"][number, :length]
            torch.testing.assert_close(torch.tensor(rollout.log_probs), log_probs, atol=1e-5, rtol=0)
            assert [version == -1 for version in rollout.versions] == [
                mark == ADDED for mark in rollout.marks
            ]
            assert sum(mark in (CUT, STOPPED) for mark in rollout.marks) == 1 + number % 3


def test_tokens_that_were_not_drawn_are_not_trained(drawn: tuple[list[dict], PreTrainedModel]) -> None:
    """Their advantages are no numbers."""
    metrics = drawn[0][0]["metrics"]
    assert metrics["actor/grad_norm"] > 0
    assert math.isfinite(metrics["actor/grad_norm"]) and metrics["actor/skipped_steps"] == 0
