"""Results of an evaluation, some of whose responses have no score."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from hybridengine.errors import DataError
from hybridengine.training.iterations import evaluate


class Answered:
    """Rows that have been answered and scored."""

    def __init__(self, columns: TensorDict) -> None:
        self._columns = columns

    def union(self, other: object) -> Answered:
        return self

    def __getitem__(self, index: slice) -> Answered:
        return Answered(self._columns[index])  # pyright: ignore[reportArgumentType]

    def get(self, *names: str) -> TensorDict:
        return self._columns


def roles(scores: list[float], dropped: list[bool]) -> Any:
    columns = {"scores": torch.tensor(scores), "dropped": torch.tensor(dropped)}
    answered = Answered(TensorDict(columns, batch_size=[len(scores)]))  # pyright: ignore[reportArgumentType]
    actor = SimpleNamespace(
        num_ranks=4,
        switch_to_generate=lambda: None,
        switch_to_train=lambda: None,
        generate_sequences=lambda prompts, greedy: None,
    )
    reward = SimpleNamespace(num_ranks=2, has_full_score=True, compute_scores=lambda rollout: None)
    prompts = SimpleNamespace(held_out_prompts=lambda rows: answered)
    return SimpleNamespace(actor=actor, reward=reward, prompts=prompts)


def test_responses_without_a_score_are_left_out_of_the_results_and_counted() -> None:
    # The fourth row is an answer for the sake of the fourth rank, and counts nowhere.
    nan = float("nan")
    found, _ = evaluate(roles([1.0, nan, 0.5, nan], [False, True, False, True]), num_prompts=3)
    assert found == {
        "eval/score_mean": 0.75,
        "eval/exact_match": 0.5,
        "eval/dropped_share": pytest.approx(1 / 3),
    }


def test_an_evaluation_without_any_score_names_rewards_and_episodes() -> None:
    with pytest.raises(
        DataError, match=r"none of the held-out .* the reward, or of rollout\.episode\.function"
    ):
        evaluate(roles([float("nan")] * 4, [True] * 4), num_prompts=4)
