"""Episodes in a run's configuration, queue and rows: rules, checkpoints, masks, scores and metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from hybridengine.algorithms.across import ONE_PROCESS
from hybridengine.config import load_config
from hybridengine.config.sections import StalenessSection
from hybridengine.data.datasets import EPISODE_ROWS, PromptDataset
from hybridengine.data.rewards import episode_scores
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.drivers.advantages import rollout_metrics
from hybridengine.drivers.grpo import Grpo
from hybridengine.episodes.wire import FAILURES, Ended
from hybridengine.errors import CheckpointError, ConfigError
from hybridengine.report import keys
from hybridengine.rollouts.drawn import ADDED, CUT, DRAWN, STOPPED, Drawn
from hybridengine.rollouts.episodes import episode_columns
from hybridengine.rollouts.queue import Rollout, RolloutQueue, read_queue, save_queue
from hybridengine.rows.micro_batches import RESPONSE_MASK, drawn_tokens, loss_mask
from hybridengine.rows.supports import WHOLE

FUNCTION = "tests.unit.episode_cases:does_what_the_answer_says"
SECTIONS: dict[str, Any] = {
    "base": str(Path("configs/async-grpo.yaml").absolute()),
    "rollout": {"episode": {"function": FUNCTION, "metrics": ["tries"]}},
    "reward": {"kind": "episode"},
}


def load(folder: Path, *overrides: str, **sections: Any) -> Any:
    (folder / "run.yaml").write_text(yaml.safe_dump(SECTIONS | sections))
    return load_config(folder / "run.yaml", overrides)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rollout": {}},
            r"reward\.kind=episode is the reward that rollout\.episode\.function returns, and the run has no",
        ),
        (
            {"generation": {"replay": "calls.jsonl"}},
            r"generation\.replay=calls\.jsonl repeats a run bit by bit",
        ),
        ({"rollout": {"episode": {}}}, r"rollout\.episode\.function"),
        ({"rollout": {"episode": {"function": "nothing"}}}, r"'nothing' is not a function's import path"),
        (
            {"rollout": {"episode": {"function": FUNCTION, "metrics": ["a/b"]}}},
            r"'a/b' cannot be the name of a metric",
        ),
        *(
            (
                {"rollout": {"episode": {"function": FUNCTION, "metrics": ["tries", name]}}},
                rf"metrics has {name}, and episode/{name} is a column of every episode; give the metric another name",
            )
            for name in (column.removeprefix("episode/") for column in keys.EPISODE_COLUMNS)
        ),
        ({"rollout": {"episode": {"function": FUNCTION, "max_turns": 0}}}, r"rollout\.episode\.max_turns=0"),
    ],
)
def test_bad_sections(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **sections)


def drawn_of(number: int, marks: list[int], kept: int = 0, outcome: Ended | None = None) -> Drawn:
    """Return one episode's news: token i is 10 + i, of version 3; added ones have none."""
    added = np.array([mark == ADDED for mark in marks], dtype=bool)
    return Drawn(
        numbers=np.array([number]),
        counts=np.array([len(marks)]),
        has_ended=np.array([outcome is not None]),
        tokens=np.arange(10, 10 + len(marks), dtype=np.int32),
        log_probs=np.where(added, 0.0, -0.5).astype(np.float32),
        versions=np.where(added, -1, 3).astype(np.int32),
        marks=np.array(marks, dtype=np.uint8),
        kept=np.array([kept]),
        outcomes={} if outcome is None else {number: outcome},
    )


MARKS = st.lists(st.sampled_from([ADDED, DRAWN, CUT, STOPPED]), max_size=12)


@given(MARKS, st.data())
def test_tokens_that_follow_those_that_are_kept_replace_the_others(
    marks: list[int], data: st.DataObject
) -> None:
    queue = RolloutQueue(1, 1, 4, StalenessSection(max_versions=2))
    (rollout,) = queue.admit(1)
    expected: list[int] = []
    for part in (marks, data.draw(MARKS), data.draw(MARKS)):
        kept = data.draw(st.integers(0, len(expected)))
        expected = [*expected[:kept], *part]
        queue.record(drawn_of(0, part, kept))
        assert rollout.marks == expected
        assert len(rollout.tokens) == len(rollout.log_probs) == len(rollout.versions) == len(expected)
        assert [version == -1 for version in rollout.versions] == [mark == ADDED for mark in expected]


def test_a_checkpoint_has_marks_and_outcomes(tmp_path: Path) -> None:
    config = load(tmp_path)
    queue = RolloutQueue.of(config)
    queue.admit(3)
    ended = Ended(1, 0.5, {"tries": 2.0}, [True, False])
    queue.record(drawn_of(0, [DRAWN, STOPPED, ADDED, DRAWN]))
    queue.record(drawn_of(1, [CUT, ADDED, STOPPED], outcome=ended))
    save_queue(queue, "00", tmp_path / "queue")
    again, _ = read_queue(config, tmp_path / "queue")
    for number in range(3):
        ours, theirs = queue._rollouts[number], again._rollouts[number]
        assert (ours.marks, ours.outcome, ours.tokens) == (theirs.marks, theirs.outcome, theirs.tokens)
    assert again._rollouts[1].trained == [True, False, False], "the second turn is not trained"
    without = load(tmp_path, rollout={}, reward={})
    with pytest.raises(CheckpointError, match=r"are episodes, and rollout\.episode says otherwise"):
        read_queue(without, tmp_path / "queue")


def ended_rows() -> tuple[list[Rollout], TensorDict]:
    """Return four episodes of up to 6 tokens with their columns; the third has failed, the last has no turn."""
    rollouts = []
    for number, (marks, outcome) in enumerate(
        [
            ([DRAWN, STOPPED, ADDED, CUT], Ended(0, 1.0, {"tries": 2.0}, [True, True])),
            ([CUT, CUT, ADDED, ADDED, STOPPED, ADDED], Ended(1, -0.5, {}, [True, False, True])),
            ([DRAWN], Ended(2, kind="deadline", text="it did not end")),
            ([], Ended(3, 0.0, {"tries": 1.0})),
        ]
    ):
        rollout = Rollout(number)
        drawn = drawn_of(number, marks, outcome=outcome)
        rollout.record(drawn, 0, slice(0, len(marks)), [WHOLE] * len(marks), has_ended=True)
        rollouts.append(rollout)
    section = load_config("configs/grpo.yaml").rollout.model_copy(update={"max_response_tokens": 6})
    episode = section.model_validate({"episode": {"function": FUNCTION, "metrics": ["tries"]}}).episode
    columns: dict[str, Any] = {
        "response_lengths": torch.tensor([len(one.tokens) for one in rollouts]),
        **episode_columns(rollouts, section.model_copy(update={"episode": episode})),
    }
    assert episode_columns(rollouts, section) == {}
    return rollouts, TensorDict(columns, batch_size=[4])


def test_columns_and_masks() -> None:
    _, rows = ended_rows()
    expected = [[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    assert rows[RESPONSE_MASK].int().tolist() == expected
    assert drawn_tokens(rows, 6).int().tolist() == expected
    assert loss_mask(rows, 5, [1, 0]).int().tolist() == [expected[1][:5], expected[0][:5]]
    assert rows[keys.EPISODE_FAILURE].tolist() == [0, 0, 1 + [*FAILURES].index("deadline"), 0]
    assert rows[keys.EPISODE_TURNS].tolist() == [2, 3, 0, 0]
    rewards = rows[keys.EPISODE_REWARD].tolist()
    assert [rewards[0], rewards[1], rewards[3]] == [1.0, -0.5, 0.0] and math.isnan(rewards[2])
    assert [math.isnan(value) for value in rows["episode/tries"].tolist()] == [False, True, True, False]


def test_scores_of_failed_episodes_are_dropped() -> None:
    _, rows = ended_rows()
    alone = episode_scores(
        TensorDict(
            {"scores": rows[keys.EPISODE_REWARD], keys.EPISODE_FAILURE: rows[keys.EPISODE_FAILURE]}, [4]
        ),
        ONE_PROCESS,
        {},
    )
    assert alone["dropped"].tolist() == [False, False, True, False]
    assert alone["scores"][[0, 1, 3]].tolist() == [1.0, -0.5, 0.0]
    functions = TensorDict({"scores": torch.tensor([3.0, 4.0, 5.0, math.nan])}, [4])
    functions["dropped"] = functions["scores"].isnan()
    functions[keys.EPISODE_FAILURE] = rows[keys.EPISODE_FAILURE]
    found = episode_scores(functions, ONE_PROCESS, {})
    assert found["dropped"].tolist() == [False, False, True, True]
    assert found["scores"][:2].tolist() == [3.0, 4.0]
    terms = TensorDict(
        {"reward/a": rows[keys.EPISODE_REWARD], "reward/b": torch.tensor([1.0, 2.0, 3.0, 4.0])}, [4]
    )
    terms[keys.EPISODE_FAILURE] = rows[keys.EPISODE_FAILURE]
    weighted = episode_scores(terms, ONE_PROCESS, {"reward/a": 2.0, "reward/b": 0.5})
    assert weighted["scores"][[0, 1, 3]].tolist() == [2.5, 0.0, 2.0]
    assert weighted["dropped"].tolist() == [False, False, True, False]


def test_metrics_count_tokens_that_were_drawn() -> None:
    _, rows = ended_rows()
    for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "entropies"):
        rows[name] = torch.zeros(4, 6)
    rows["log_probs"] = torch.where(rows[RESPONSE_MASK], -1.0, math.nan)
    rows["ref_log_probs"] = torch.where(rows[RESPONSE_MASK], -1.5, math.nan)
    rows["prompt_lengths"] = torch.full((4,), 2)
    rows["scores"], rows["dropped"] = torch.tensor([1.0, -0.5, math.nan, 0.0]), rows[keys.EPISODE_FAILURE] > 0
    metrics = rollout_metrics(rows, ONE_PROCESS, Grpo())
    assert metrics[keys.KL_MEAN] == pytest.approx(0.5)
    assert metrics[keys.RESPONSE_TOKENS_MEAN] == (4 + 6 + 1 + 0) / 4
    assert metrics[keys.TOKENS] == 8 + 11
    assert metrics["episode/turns_mean"] == 5 / 4
    assert metrics["episode/trained_token_share"] == pytest.approx(6 / 11)
    assert metrics["episode/failed_share"] == 0.25
    assert {kind: metrics[f"episode/failed_{kind}"] for kind in FAILURES} == {
        kind: float(kind == "deadline") for kind in FAILURES
    }
    assert metrics["episode/reward_mean"] == pytest.approx(0.5 / 3)
    assert metrics["episode/tries_mean"] == 1.5


def test_rows_of_episodes_tell_their_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text(json.dumps({"prompt": "1 + 2", "answer": "3"}) + "\n")
    prompts = PromptDataset(file, build_arithmetic_tokenizer(), 16, json_column=EPISODE_ROWS)
    found = json.loads(prompts.rows([0])[EPISODE_ROWS][0])
    assert found == {"place": f"{file}, line 1", "number": 0, "prompt": "1 + 2", "answer": "3"}
