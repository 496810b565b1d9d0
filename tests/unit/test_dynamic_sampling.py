"""Dynamic sampling in synchronous GRPO: which prompts are trained, which are used up, and what a resumed run draws."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from hybridengine.config import load_config
from hybridengine.config.algorithm import algorithm_class
from hybridengine.data.datasets import rows_after
from hybridengine.drivers.dynamic_sampling import draw_informative
from hybridengine.drivers.grpo import Grpo
from hybridengine.drivers.roles import Sampling
from hybridengine.planning.costs.dataflows import calls_of
from hybridengine.rows.protocols import ROW_NUMBERS
from hybridengine.training.iterations import _carry_out
from hybridengine.training.saving import Progress
from tests.unit.test_pools_config import problems
from workers.prompts import PromptWorker

NUM_ROWS, PROMPTS, SAMPLES, SEED = 11, 4, 3, 5


class Here:
    """Rows with the methods of references to rows, in this process."""

    def __init__(self, rows: TensorDict) -> None:
        self.rows = rows

    def repeat(self, times: int) -> Here:
        return self[torch.arange(len(self.rows)).repeat_interleave(times)]

    def union(self, other: Here) -> Here:
        return Here(self.rows.copy().update(other.rows))

    def concat(self, *others: Here) -> Here:
        return Here(torch.cat([self.rows, *(other.rows for other in others)]))  # pyright: ignore

    def __getitem__(self, index: Any) -> Here:
        return Here(self.rows[torch.as_tensor(index)])  # pyright: ignore

    def get(self, *names: str) -> TensorDict:
        return self.rows.select(*names)


def table(**columns: torch.Tensor) -> TensorDict:
    size = len(next(iter(columns.values())))
    return TensorDict(columns, batch_size=[size])  # pyright: ignore[reportArgumentType]


class Groups:
    """Roles whose responses have the scores of a table, row of the data -> scores; NaN is a row without one."""

    unit = 1

    def __init__(self, scores: dict[int, list[float]], step: int = 0, prompts_drawn: int = 0) -> None:
        run: Any = SimpleNamespace(data=SimpleNamespace(batch_size=PROMPTS), run=SimpleNamespace(seed=SEED))
        self.scores, self.worker = scores, PromptWorker(None, run)  # type: ignore[arg-type]
        self.worker.go_on_after(step, prompts_drawn)
        self.worker._reader = SimpleNamespace(training_rows=self)  # type: ignore[assignment]
        self.drawn, self.seeds, self.calls = list[int](), list[int](), list[str]()
        self.prompts = self.reward = self.actor = self

    def __len__(self) -> int:
        return NUM_ROWS

    def rows_of(self, row_ids: list[int]) -> TensorDict:
        self.drawn += row_ids
        return table(row_ids=torch.tensor(row_ids))

    rows = rows_of

    def training_prompts(self, rows: Any, step: int, num_more: int = 0) -> Here:
        self.calls.append("prompts")
        numbered = table(**{ROW_NUMBERS: torch.arange(PROMPTS)})
        return Here(self.worker.training_prompts(numbered, step, num_more))

    def switch_to_generate(self) -> Any:
        self.calls.append("generate")
        return SimpleNamespace(get=lambda: [{"received_bytes": 1}])

    switch_to_train = switch_to_generate

    def generate_sequences(self, prompts: Here, seed: int) -> Here:
        seeds = torch.arange(seed, seed + len(prompts.rows))
        self.seeds += seeds.tolist()
        return Here(table(seeds=seeds))

    def compute_scores(self, rollout: Here) -> Here:
        row_ids = rollout.rows["row_ids"].view(-1, SAMPLES)[:, 0].tolist()
        scores = torch.tensor([self.scores[row] for row in row_ids]).flatten()
        return Here(table(scores=scores, dropped=scores.isnan()))


def sampling(step: int) -> Sampling:
    return Sampling(step=step, num_prompts=PROMPTS, samples_per_prompt=SAMPLES, first_seed=1000 * step)


def is_equal(scores: list[float]) -> bool:
    return len({score for score in scores if score == score}) < 2


score = st.sampled_from([0.0, 1.0, float("nan")])


@settings(deadline=None)
@given(
    scores=st.lists(
        st.lists(score, min_size=SAMPLES, max_size=SAMPLES), min_size=NUM_ROWS, max_size=NUM_ROWS
    ),
    max_rounds=st.integers(2, 4),
    stop=st.integers(0, 3),
)
def test_the_batches_of_a_run_and_of_a_resumed_one(
    scores: list[list[float]], max_rounds: int, stop: int
) -> None:
    """They equal a loop over the stream of prompts; after `stop` steps the run is resumed from its state as text."""
    by_row, stream = dict(enumerate(scores)), rows_after(NUM_ROWS, 100, SEED, 0)
    roles, state, place = Groups(by_row), dict[str, float](), 0
    for step in range(1, 5):
        if step == stop + 1:
            roles, state = Groups(by_row, stop, stop * PROMPTS), json.loads(json.dumps(state))
        candidates = list[int]()
        rounds = 0
        while rounds < max_rounds and sum(not is_equal(by_row[row]) for row in candidates) < PROMPTS:
            candidates += stream[place : place + PROMPTS]
            place, rounds = place + PROMPTS, rounds + 1
        places = range(len(candidates))
        informative = [one for one in places if not is_equal(by_row[candidates[one]])]
        others = [one for one in places if one not in informative]
        expected = sorted((informative + others)[:PROMPTS])
        roles.drawn, roles.seeds, roles.calls = [], [], []
        found = draw_informative(roles, sampling(step), state, max_rounds)  # type: ignore[arg-type]
        assert roles.drawn == candidates and roles.calls == ["prompts", "generate", "generate"] * rounds
        assert roles.seeds == [*range(1000 * step, 1000 * step + len(candidates) * SAMPLES)]
        rows = [one * SAMPLES + sample for one in expected for sample in range(SAMPLES)]
        assert found.rollout.rows["seeds"].tolist() == [1000 * step + row for row in rows]
        assert found.rollout.rows["row_ids"].tolist() == [candidates[row // SAMPLES] for row in rows]
        wanted = torch.tensor([by_row[candidates[one]] for one in expected]).flatten()
        assert torch.equal(found.scores.rows["scores"].nan_to_num(-1), wanted.nan_to_num(-1))
        known = [one for row in candidates for one in by_row[row] if one == one]
        assert found.metrics == {
            "rollout/rounds": rounds,
            "rollout/equal_groups": len(others),
            "rollout/drawn_reward_mean": pytest.approx(sum(known) / max(1, len(known))),
        }
        assert (len(found.to_generate), len(found.to_train)) == (rounds, rounds)
        assert state == {"more_prompts": place - step * PROMPTS}


def test_one_round_reads_and_leaves_no_state() -> None:
    roles, state = Groups({row: [0.0] * SAMPLES for row in range(NUM_ROWS)}), dict[str, float]()
    found = Grpo().draw(roles, sampling(2), state)  # type: ignore[arg-type]
    assert found.scores is None and found.metrics == state == {}
    assert roles.drawn == rows_after(NUM_ROWS, PROMPTS, SEED, PROMPTS)


@pytest.mark.parametrize("name", ["grpo", "grpo_from_engine"])
def test_the_planner_prices_one_round(name: str) -> None:
    kind: Any = algorithm_class(name)
    assert calls_of(kind(max_rounds=4), 5, 3) == calls_of(kind(), 5, 3)


def test_seeds_of_steps_do_not_overlap(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more rows in all rounds of a step than numbers lie between the seeds of two steps otherwise."""
    changes = ["data.batch_size=16384", "rollout.samples_per_prompt=2", "data.task.train_rows=20000"]
    config = load_config(built, [*changes, "algorithm.name=grpo", "algorithm.max_rounds=5"])
    seen = list[Sampling]()
    algorithm = config.algorithm.model_copy()
    monkeypatch.setattr(Grpo, "step", lambda self, roles, sampling, state: seen.append(sampling) or {})
    config = config.model_copy(update={"algorithm": algorithm})
    for step in (1, 2):
        _carry_out(config, SimpleNamespace(), Progress(), step)  # type: ignore[arg-type]
    assert seen[1].first_seed - seen[0].first_seed == 5 * 32_768


def test_an_asynchronous_run_drops_prompts_in_its_queue(tmp_path: Path) -> None:
    pools = {"engines": {"roles": ["generation"], "ranks_per_node": [1]}}
    found = problems(
        tmp_path,
        cluster={"ranks_per_node": [1], "pools": pools},
        algorithm={"name": "async_grpo", "max_rounds": 3},
        rollout={"samples_per_prompt": 2},
    )
    assert (
        "algorithm.max_rounds=3 is not read by algorithm.name=async_grpo, whose engines draw all the" in found
    )
