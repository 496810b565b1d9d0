"""Environments: their rows, episodes of Gymnasium with written turns, and what is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import gymnasium
import pytest

from hybridengine.environments.child import different_rows
from hybridengine.environments.environment import Prompt, load_environment
from hybridengine.environments.gymnasium import plain_text
from hybridengine.episodes.client import Client, EpisodeError, Result, Row
from hybridengine.errors import DataError
from tests.unit.byte_episodes import first_prompts, play

# ---- rows ----


def test_rows_are_different_and_those_of_seeds_are_disjoint() -> None:
    environment = load_environment("reasoning_gym/chain_sum", {"max_terms": 2, "max_digits": 1}, {})
    rows = different_rows(environment, 0, 60)
    assert len({row["prompt"][0]["content"] for row in rows}) == 60
    assert rows == different_rows(environment, 0, 60)
    other = load_environment("reasoning_gym/chain_sum", {}, {})
    texts = [{row["prompt"][0]["content"] for row in different_rows(other, seed, 30)} for seed in (0, 1)]
    assert not texts[0] & texts[1]
    with pytest.raises(DataError, match=r"has \d+ different prompts, and train_rows \+ eval_rows is 1000"):
        different_rows(environment, 0, 1000)


class Dice:
    """Draws one of 200 prompts; some are found only after hundreds of draws."""

    def __init__(self, name: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.drawn: list[int] = []

    def prompts(self, seed: int, count: int) -> Iterator[Prompt]:
        random = Random(seed)
        for _ in range(count):
            self.drawn.append(random.randrange(200))
            yield Prompt(f"{self.drawn[-1]}", None, f"{self.drawn[-1]}")

    async def play(self, client: Client, row: Row, answer: Any) -> Result:
        raise AssertionError("never played")


@pytest.mark.parametrize("seed", range(10))
def test_no_prompts_are_drawn_in_vain(seed: int) -> None:
    dice = Dice("dice", {}, {})
    with pytest.raises(
        DataError, match=r"^has 200 different prompts, and train_rows \+ eval_rows is 100000;"
    ):
        different_rows(dice, seed, 100_000)
    assert len(dice.drawn) < 5000


# ---- Gymnasium ----

LAKE = ["SFFF", "FHFH", "FFFH", "HFFG"]
"""Gymnasium's map 4x4: start, frozen, hole, goal."""
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def drawn_lake(row: int, column: int) -> str:
    lines = [[*line] for line in LAKE]
    lines[row][column] = f"[{lines[row][column]}]"
    return "\n".join(map("".join, lines))


@pytest.mark.parametrize(
    ("path", "reward"),
    [
        ("down down right down right right", 1.0),
        ("right down", 0.0),
        ("left up right right down down down right", 1.0),
    ],
)
def test_a_frozen_lake_is_walked_in_words(path: str, reward: float) -> None:
    environment = load_environment(
        "gymnasium/FrozenLake-v1", {"is_slippery": False}, {"instructions": "Walk."}
    )
    (prompt,) = first_prompts(environment, 1)
    choices = "Answer with one of: left, down, right, up."
    assert prompt.prompt == [
        {"role": "system", "content": "Walk."},
        {"role": "user", "content": f"{drawn_lake(0, 0)}\n{choices}"},
    ]
    row, column, drawings = 0, 0, list[str]()
    for word in path.split():
        row, column = (
            min(3, max(0, place + move)) for place, move in zip((row, column), MOVES[word], strict=True)
        )
        lines = drawn_lake(row, column)
        drawings.append(f"  ({word.capitalize()})\n{lines}")
    result, read = play(environment, prompt, *(f"not up but {word.upper()}!" for word in path.split()))
    assert (result.reward, result.metrics) == (reward, {"steps": len(path.split()), "invalid_actions": 0})
    assert read == [f"{{user}}{drawing}" for drawing in drawings[:-1]]


def test_turns_without_an_action_are_answered_and_end_the_episode() -> None:
    environment = load_environment("gymnasium/FrozenLake-v1", {}, {"invalid_actions": 2})
    (prompt,) = first_prompts(environment, 1)
    result, read = play(environment, prompt, "upwards", "", "leftover")
    assert (result.reward, result.metrics) == (0.0, {"steps": 0, "invalid_actions": 3})
    assert read == ["{user}Answer with one of: left, down, right, up."] * 2


def test_steps_are_limited() -> None:
    environment = load_environment("gymnasium/CliffWalking-v1", {}, {"max_steps": 3})
    (prompt,) = first_prompts(environment, 1)
    result, _ = play(environment, prompt, "up", "up", "up")
    assert (result.reward, result.metrics["steps"]) == (-3.0, 3)
    own = load_environment("gymnasium/CliffWalking-v1", {"max_episode_steps": 2}, {})
    result, _ = play(own, prompt, "up", "right")
    assert (result.reward, result.metrics["steps"]) == (-2.0, 2)


def test_an_episode_that_runs_out_of_tokens_has_the_rewards_until_then() -> None:
    environment = load_environment("gymnasium/CliffWalking-v1", {}, {})
    (prompt,) = first_prompts(environment, 1)
    limited = load_environment("gymnasium/CliffWalking-v1", {}, {"max_steps": 2})
    _, (drawing,) = play(limited, prompt, "up", "up")
    for room in (0, 5, len(drawing) - 1, len(drawing)):
        used = 2 + len(drawing) + 2
        result, read = play(environment, prompt, "up", "up", max_tokens=used + room)
        assert (result.reward, result.metrics) == (-2.0, {"steps": 2, "invalid_actions": 0})
        assert read == [drawing]
    result, read = play(environment, prompt, "I should", max_tokens=8)
    assert (result.reward, result.metrics) == (0.0, {"steps": 0, "invalid_actions": 1})


def test_an_episode_that_runs_out_of_turns_has_the_rewards_until_then() -> None:
    environment = load_environment("gymnasium/CliffWalking-v1", {}, {})
    (prompt,) = first_prompts(environment, 1)
    result, read = play(environment, prompt, "up", "right", "up", max_turns=3)
    assert (result.reward, result.metrics, len(read)) == (-3.0, {"steps": 3, "invalid_actions": 0}, 2)
    corrected = load_environment("reasoning_gym/chain_sum", {}, {"tries": 3})
    (prompt,) = first_prompts(corrected, 1)
    result, read = play(corrected, prompt, "1e9", "2e9", max_turns=2)
    assert (result.metrics, len(read)) == ({"tries": 2, "solved": 0.0, "unread": 0}, 1)


@pytest.mark.parametrize("seed", range(4))
def test_an_episode_is_that_of_the_environment_with_the_same_seed(seed: int) -> None:
    environment = load_environment("gymnasium/Blackjack-v1", {}, {"observation": "{0} against {1}"})
    prompt = first_prompts(environment, seed + 1)[seed]
    reference = gymnasium.make("Blackjack-v1")
    observation, _ = reference.reset(seed=seed)
    texts, turns, total, ended = list[str](), list[str](), 0.0, False
    while not ended:
        texts.append(f"{observation[0]} against {observation[1]}")
        action = int(observation[0] < 18)
        observation, reward, ended, _, _ = reference.step(action)
        turns.append(("stick", "hit")[action])
        total += float(reward)
    result, read = play(environment, prompt, *turns)
    assert prompt.prompt == [{"role": "user", "content": f"{texts[0]}\nAnswer with one of: stick, hit."}]
    assert (read, result.reward, result.metrics["steps"]) == (
        [f"{{user}}{text}" for text in texts[1:]],
        total,
        len(turns),
    )


class Echo(gymnasium.Env):
    """Asks for the word in its observation."""

    observation_space = action_space = gymnasium.spaces.Text(32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._word = f"word{self.np_random.integers(100)}"
        return self._word, {}

    def step(self, action: str) -> Any:
        return "done", float(action == self._word), True, False, {}


def test_textual_spaces_are_read_and_written_as_they_are() -> None:
    gymnasium.register("Echo-v0", f"{__name__}:Echo")
    try:
        environment = load_environment(f"gymnasium/{__name__}:Echo-v0", {}, {})
        (prompt,) = first_prompts(environment, 1)
        asked: Any = prompt.prompt[-1]
        assert play(environment, prompt, f" {asked['content']}\n")[0].reward == 1.0
        assert play(environment, prompt, "another")[0].reward == 0.0
    finally:
        del gymnasium.registry["Echo-v0"]


def test_an_environment_that_begins_differently_with_one_seed_is_refused() -> None:
    """Gymnasium's documentation has this option, whose map nobody can write into a prompt."""
    environment = load_environment("gymnasium/FrozenLake-v1", {"map_name": None}, {})
    with pytest.raises(DataError, match="begins differently each time with one seed"):
        first_prompts(environment, 1)


def test_an_episode_that_begins_otherwise_than_its_prompt_is_no_episode() -> None:
    gymnasium.register("Echo-v0", f"{__name__}:Echo")
    try:
        environment = load_environment(f"gymnasium/{__name__}:Echo-v0", {}, {})
        prompt, _ = first_prompts(environment, 2)
        prompt.answer["seed"] += 1
        with pytest.raises(EpisodeError, match=r'begins otherwise than its prompt: "word\d+"; only the seed'):
            play(environment, prompt, "word0")
    finally:
        del gymnasium.registry["Echo-v0"]


def test_numbers_of_numpy_are_shown_as_those_of_python() -> None:
    environment = load_environment("gymnasium/Blackjack-v1", {}, {"actions": ["stick", "hit"]})
    (prompt,) = first_prompts(environment, 1)
    asked: Any = prompt.prompt[-1]
    assert re.match(r"\(\d+, \d+, [01]\)\nAnswer", asked["content"])


def test_colours_become_marks() -> None:
    rendered = "\x1b[41mS\x1b[0mF \x1b[34;1mR\x1b[0m \x1b[43m_\x1b[0m\x1b[92mx\x1b[0m"
    assert plain_text(rendered) == "[S]F R(blue) [_]x(green)"


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "options", "settings", "text"),
    [
        ("reasoning_gym/chain_sums", {}, {}, "is not a dataset of reasoning-gym; did you mean chain_sum?"),
        (
            "reasoning_gym/chain_sum",
            {"min_terms": -1},
            {},
            r"refuses its options \(AssertionError: min_terms",
        ),
        ("reasoning_gym/chain_sum", {"terms": 1}, {}, r"refuses its options \(TypeError: .*'terms'"),
        ("reasoning_gym/chain_sum", {"seed": 1}, {}, "options.seed is set by data.environment's seed"),
        ("reasoning_gym/chain_sum", {}, {"tris": 2}, "has no setting 'tris'; did you mean tries?"),
        ("reasoning_gym/chain_sum", {}, {"tries": "2"}, 'settings.tries="2" must be of type int'),
        ("reasoning_gym/chain_sum", {}, {"tries": 0}, "settings.tries=0 must be at least 1"),
        ("reasoning_gym/chain_sum", {}, {"max_tokens": -3}, "settings.max_tokens=-3 must be at least 0"),
        ("gymnasium/FrozenLak-v1", {}, {}, "is not registered with Gymnasium .*Did you mean: `FrozenLake`"),
        (
            "gymnasium/no_such:Taxi-v4",
            {},
            {},
            r"is not registered with Gymnasium \(No module named 'no_such'",
        ),
        ("gymnasium/FrozenLake-v1", {"map": 1}, {}, r"refuses its options \(TypeError: .*'map'"),
        ("gymnasium/CartPole-v1", {}, {}, "has 2 actions, and settings.actions has 0 words"),
        ("gymnasium/Pendulum-v1", {}, {}, "only discrete and textual ones can be played"),
        ("gymnasium/FrozenLake-v1", {}, {"actions": ["a", 2]}, "must be words"),
    ],
)
def test_refusals(name: str, options: Any, settings: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        load_environment(name, options, settings)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("gymnasium/FrozenLake-v1", r"install hybridengine\[environments\]"),
        ("reasoning_gym/chain_sum", r"install hybridengine\[tasks\]"),
        (
            "verifiers/sums",
            "install verifiers into an environment of its own and name its Python in",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    package = name.partition("/")[0]
    for module in (package, f"{package}.factory", f"{package}.v1"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=f"needs the package {package}, which is not installed; {remedy}"):
        load_environment(name, {}, {})
