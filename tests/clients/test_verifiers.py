"""Environments of the `verifiers` package, as published, roll out on the weights that a Tinker client trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.servers import Server, result_of
from tests.clients.warm_model import SHOT, questions

pytestmark = pytest.mark.timeout(1800)

CALLS = Path(__file__).with_name("verifiers_calls.py")
NUM_QUESTIONS, NUM_SAMPLES, NUM_STEPS = 4, 8, 2


@pytest.fixture(scope="module")
def question_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of questions that the warm model answers right in about half of its samples."""
    file = tmp_path_factory.mktemp("verifiers") / "questions.jsonl"
    asked, answered = SHOT
    shot = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    rows = [
        {"prompt": [*shot, {"role": "user", "content": f"What is {x} + {y}?"}], "answer": str(x + y)}
        for x, y in [*questions()][:NUM_QUESTIONS]
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def assert_log_probs(trace: dict[str, Any], computed: list[float | None]) -> None:
    """Check the log-probs of a trace's sampled tokens against those that the Tinker SDK computes."""
    sampled = [place for place, drawn in enumerate(trace["sampled"]) if drawn]
    assert sampled
    assert len(trace["token_ids"]) == len(computed)
    assert [trace["logprobs"][place] for place in sampled] == pytest.approx(
        [computed[place] for place in sampled], abs=1e-4
    )


def test_the_reward_of_an_environment_rises_as_a_tinker_client_trains_on_its_rollouts(
    server: Server, warm_model: Path, question_file: Path, tmp_path: Path
) -> None:
    found = result_of(server.client(CALLS, "training", question_file, warm_model, cwd=tmp_path))
    answers = [str(x + y) for x, y in [*questions()][:NUM_QUESTIONS]]
    means = []
    for rollout, computed in zip(found["rollouts"], found["computed"], strict=True):
        for answer, group, log_probs in zip(answers, rollout, computed, strict=True):
            assert len(group) == NUM_SAMPLES
            for trace in group:
                assert trace["errors"] == []
                assert len(trace["replies"]) == 1
                assert trace["reward"] == float((trace["replies"][0] or "").strip() == answer)
            assert_log_probs(group[0], log_probs)
        rewards = [trace["reward"] for group in rollout for trace in group]
        means.append(sum(rewards) / len(rewards))
    assert len(means) == NUM_STEPS + 1
    assert 0.2 < means[0] < 0.75
    assert means[-1] > means[0] + 0.2, means


def test_a_conversation_of_two_turns_with_a_tool_has_the_tokens_and_log_probs_of_both(
    server: Server, warm_model: Path, question_file: Path, tmp_path: Path
) -> None:
    found = result_of(server.client(CALLS, "two_turns", question_file, warm_model, cwd=tmp_path))
    assert len(found["traces"]) == NUM_QUESTIONS
    for trace, computed in zip(found["traces"], found["computed"], strict=True):
        assert trace["errors"] == []
        assert trace["tools"] == ["add"]
        assert len(trace["replies"]) == 2
        assert trace["reward"] == float((trace["replies"][-1] or "").strip() == trace["answer"])
        assert_log_probs(trace, computed)
