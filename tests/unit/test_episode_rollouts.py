"""Episodes on an engine that draws tokens by their places, with functions in real processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tensordict import NonTensorStack, TensorDict

import workers.episodes
from hybridengine.backends.engine import Request, Response
from hybridengine.config import load_config
from hybridengine.data.datasets import EPISODE_ROWS
from hybridengine.episodes.processes import Episodes
from hybridengine.episodes.wire import Ended
from hybridengine.report import keys
from hybridengine.rollouts.drawn import ADDED, CUT, DRAWN
from hybridengine.rollouts.episodes import episode_columns
from hybridengine.rollouts.queue import Rollout
from hybridengine.rows.micro_batches import RESPONSE_MASK, ROUTES
from hybridengine.rows.supports import SUPPORTS
from workers.episodes import EpisodeRollouts, respond_by_episodes

PROMPT = [2, 3, 4]
WIDTH = 24
NUM_LAYERS, NUM_ACTIVE = 2, 3


class FakeEngine:
    """Draws a token per step for each request: token p of a response is 10 + p, and position p has the expert p."""

    vocab_size = 60

    def __init__(self, most: int = WIDTH, *, keeps_routes: bool = False) -> None:
        self.no_routes = np.zeros((0, NUM_LAYERS, NUM_ACTIVE), np.int16) if keeps_routes else None
        self.most = most
        """Tokens of a response after which it draws no more."""
        self.running: dict[str, tuple[Request, Response]] = {}
        self.added: list[Request] = []

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def add(self, requests: Sequence[Request]) -> None:
        self.added += requests
        self.running |= {one.request_id: (one, Response(one.request_id, supports=[])) for one in requests}

    def advance(self, num_steps: int) -> list[Response]:
        assert num_steps == 1
        ended = []
        for request, response in [*self.running.values()]:
            place = request.first_position + len(response.token_ids)
            if place < self.most:
                response.token_ids.append(10 + place)
                response.log_probs.append(-1.0 - place)
                response.versions.append(3)
                assert response.supports is not None
                response.supports.append(np.array([10 + place], np.int32))
            if len(response.token_ids) == request.sampling.max_tokens:
                response.finish_reason = "length"
                ended += self.abort([request.request_id])
        return ended

    def progress(self) -> list[Response]:
        for request, response in self.running.values() if self.no_routes is not None else ():
            end = len(request.prompt_token_ids) + max(0, len(response.token_ids) - 1)
            positions = np.arange(request.num_routed, end, dtype=np.int16)
            response.routes = np.broadcast_to(
                positions[:, None, None], (len(positions), NUM_LAYERS, NUM_ACTIVE)
            )
        return [response for _, response in self.running.values()]

    def abort(self, request_ids: Iterable[str]) -> list[Response]:
        dropped = {*request_ids}
        found = [response for response in self.progress() if response.request_id in dropped]
        self.running = {name: one for name, one in self.running.items() if name not in dropped}
        return found


class Alone:
    """The only rank of an engine."""

    is_here = True

    def share(self, value: Any) -> Any:
        return value


class Runs:
    """Starts the episodes of runs, and ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[EpisodeRollouts] = []

    def start(
        self, engine: FakeEngine, function: str = "does_what_the_answer_says", **rollout: Any
    ) -> EpisodeRollouts:
        episode = {"function": f"tests.unit.episode_cases:{function}"}
        sections = {
            "base": str(
                Path("configs/moe.yaml" if "routing_replay" in rollout else "configs/grpo.yaml").absolute()
            ),
            "warmup": None,
            "rollout": {"max_response_tokens": WIDTH, "episode": episode, **rollout},
            "reward": {"kind": "episode"},
        }
        (self._folder / "run.yaml").write_text(yaml.safe_dump(sections))
        self.section = load_config(self._folder / "run.yaml").rollout
        self._started.append(EpisodeRollouts(load_config(self._folder / "run.yaml"), engine, Alone(), ()))  # type: ignore[arg-type]
        return self._started[-1]

    def close(self) -> None:
        for one in self._started:
            one.close()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    def without_tokenizer(section: Any, limits: Any, tokenizer: str, start_timeout_s: float) -> Episodes:
        return Episodes(section, limits, None, start_timeout_s)

    monkeypatch.setattr(workers.episodes, "Episodes", without_tokenizer)
    monkeypatch.setattr(workers.episodes, "STEPS", 4)
    found = Runs(tmp_path)
    yield found
    found.close()


def prompts(*answers: str) -> TensorDict:
    rows = TensorDict(
        {
            "prompt_tokens": torch.tensor([PROMPT] * len(answers)),
            "prompt_lengths": torch.full((len(answers),), len(PROMPT)),
        },
        batch_size=[len(answers)],
    )
    texts = [
        json.dumps({"place": f"row {row}", "number": row, "prompt": "1", "answer": answer})
        for row, answer in enumerate(answers)
    ]
    rows[EPISODE_ROWS] = NonTensorStack(*texts)
    return rows


def known(marks: Sequence[int]) -> Rollout:
    """Return the response of number 0 that an earlier engine has begun, with the experts of all tokens but the last."""
    positions = np.arange(len(PROMPT) + len(marks) - 1, dtype=np.int16)
    routes = np.broadcast_to(positions[:, None, None], (len(positions), NUM_LAYERS, NUM_ACTIVE))
    return Rollout(
        0,
        tokens=[7 if mark == ADDED else 10 + place for place, mark in enumerate(marks)],
        log_probs=[0.0 if mark == ADDED else -1.0 - place for place, mark in enumerate(marks)],
        versions=[-1 if mark == ADDED else 3 for mark in marks],
        supports=[
            np.array([] if mark == ADDED else [10 + place], np.int32) for place, mark in enumerate(marks)
        ],
        routes=[routes],
        marks=[*marks],
    )


def finish(rollouts: EpisodeRollouts, rollout: Rollout, answer: str) -> None:
    """Draw the rest of a response in calls of a few steps."""
    columns = {
        "numbers": torch.tensor([0]),
        "seeds": torch.tensor([5]),
        "drawn_lengths": torch.tensor([len(rollout.tokens)]),
        "drawn_routes": torch.tensor([rollout.num_routed]),
        **{
            f"drawn_{name}": torch.tensor([getattr(rollout, name)])
            for name in ("tokens", "log_probs", "versions", "marks")
        },
    }
    rollouts.begin(prompts(answer).update(columns))
    while not rollout.has_ended:
        drawn = rollouts.advance(2)
        supports = drawn.supports.each(drawn.num_tokens)
        for index, (_, has_ended, place) in enumerate(drawn.parts()):
            rollout.record(drawn, index, place, supports, has_ended=has_ended)


def assert_ends_after(rollout: Rollout, marks: Sequence[int]) -> None:
    """Assert that a response is that of `known`."""
    expected = known(marks)
    for name in ("tokens", "log_probs", "versions", "marks"):
        assert getattr(rollout, name) == getattr(expected, name), name
    assert [one.tolist() for one in rollout.supports] == [one.tolist() for one in expected.supports]
    assert np.concatenate(rollout.routes)[:, 0, 0].tolist() == [*range(len(PROMPT) + len(marks) - 1)]


MOE = {"routing_replay": True, "top_k": 5}


def test_supports_are_a_column_of_rows_that_all_fail(runs: Runs) -> None:
    """Other ranks have it, and its absence would end the run."""
    rollouts = runs.start(FakeEngine(), "fails", top_k=5)
    rows = respond_by_episodes(rollouts, prompts("1", "2"), [8, 9], runs.section, 0, greedy=False)
    assert [len(one) for one in rows[SUPPORTS]] == [0, 0]
    whole = runs.section.model_copy(update={"top_k": 0})
    assert SUPPORTS not in respond_by_episodes(rollouts, prompts("1"), [8], whole, 0, greedy=False).keys()  # noqa: SIM118


def test_experts_of_episodes_that_fail_or_end_late(runs: Runs) -> None:
    """Row 0 fails after its turn, row 1 ends in a later call than its last token."""
    rollouts = runs.start(FakeEngine(keeps_routes=True), **MOE)
    rows = respond_by_episodes(rollouts, prompts("raise", "nap"), [8, 9], runs.section, 0, greedy=False)
    assert rows["response_lengths"].tolist() == [2, 2]
    width = len(PROMPT) + WIDTH
    expected = [*range(len(PROMPT) + 1), *[-1] * (width - len(PROMPT) - 1)]
    assert rows[ROUTES].shape == (2, width, NUM_LAYERS, NUM_ACTIVE)
    assert rows[ROUTES][:, :, 1, 2].tolist() == [expected] * 2
    assert [len(one) for one in rows[SUPPORTS]] == [4, 4]


def test_experts_of_episodes_that_fail_before_a_turn(runs: Runs) -> None:
    rollouts = runs.start(FakeEngine(keeps_routes=True), "fails", **MOE)
    rows = respond_by_episodes(rollouts, prompts("1", "2"), [8, 9], runs.section, 0, greedy=False)
    assert rows[ROUTES].shape == (2, len(PROMPT) + WIDTH, NUM_LAYERS, NUM_ACTIVE)
    assert (rows[ROUTES] == -1).all()


ONE_TURN = [DRAWN, CUT]
TWO_TURNS = [*ONE_TURN, ADDED, ADDED, DRAWN, CUT]


@pytest.mark.parametrize("left", [TWO_TURNS, TWO_TURNS[:-1], TWO_TURNS[:4]])
def test_an_episode_that_begins_again_and_ends_earlier_is_cut(left: list[int], runs: Runs) -> None:
    """An earlier engine has begun a second turn, after which the function does not ask this time."""
    rollout = known(left)
    rollouts = runs.start(FakeEngine(keeps_routes=True), **MOE)
    finish(rollouts, rollout, "one turn")
    assert_ends_after(rollout, ONE_TURN)
    columns = episode_columns([rollout], runs.section)
    assert columns[RESPONSE_MASK].sum() == 2
    assert columns[keys.EPISODE_TURNS].tolist() == [1]


def test_a_turn_that_the_function_has_given_up_is_cut(runs: Runs) -> None:
    """The function stops waiting for its second turn, of which the engine has drawn two tokens."""
    rollout = Rollout(0)
    engine = FakeEngine(most=5, keeps_routes=True)
    rollouts = runs.start(engine, **MOE)
    finish(rollouts, rollout, "abandon")
    assert [len(one.prompt_token_ids) for one in engine.added] == [len(PROMPT), len(PROMPT) + 3]
    assert not engine.running
    assert rollout.tokens == [10, 11]
    assert_ends_after(rollout, ONE_TURN)
    columns = episode_columns([rollout], runs.section)
    assert not columns[RESPONSE_MASK].any(), "its result names no turn"
    assert columns[keys.EPISODE_TURNS].tolist() == [1]


def test_a_turn_after_other_tokens_is_drawn_anew(runs: Runs) -> None:
    """Its earlier tokens and their experts, which the controller knows, are forgotten."""
    rollout = known([*ONE_TURN, ADDED, ADDED, DRAWN, DRAWN])
    rollouts = runs.start(FakeEngine(keeps_routes=True), **MOE)
    finish(rollouts, rollout, "abandon")  # adds one token
    assert_ends_after(rollout, [*ONE_TURN, ADDED, *[DRAWN] * 7, CUT])
    assert rollout.trained == [*[False] * 3, *[True] * 8]


@pytest.mark.parametrize(
    ("left", "expected"), [([], [(0, 0), (3, 0)]), ([*ONE_TURN, ADDED, DRAWN, DRAWN], [(5, 2)])]
)
def test_stop_strings_and_structures_read_the_tokens_of_the_present_turn(
    left: list[int], expected: list[tuple[int, int]], runs: Runs
) -> None:
    """Not those of earlier turns, nor those that were added; but those that an earlier engine has drawn of it."""
    engine = FakeEngine(keeps_routes=True)
    finish(runs.start(engine, **MOE), known(left) if left else Rollout(0), "abandon")
    assert [(one.first_position, one.num_read) for one in engine.added] == expected


def test_tokens_after_the_turns_of_an_ended_episode_are_not_trained() -> None:
    """A checkpoint may have them."""
    rollout = known(TWO_TURNS)
    rollout.outcome = Ended(0, 1.0, {}, [True])
    assert rollout.trained == [True, True, False, False, False, False]


@pytest.mark.parametrize("num_drawn", [1, 2, 6])
def test_a_turn_of_which_fewer_tokens_are_wanted_now_is_cut(num_drawn: int, runs: Runs) -> None:
    """The function asks for two tokens; an earlier engine has told these and others, without the end of the turn."""
    rollout = known([DRAWN] * num_drawn)
    engine = FakeEngine(keeps_routes=True)
    finish(runs.start(engine, **MOE), rollout, "one turn")
    assert_ends_after(rollout, ONE_TURN)
    assert [len(one.prompt_token_ids) for one in engine.added] == [len(PROMPT) + 1]
    assert rollout.outcome is not None and rollout.outcome.reward == 1.0
