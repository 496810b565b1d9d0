"""Environments of reasoning-gym and Gymnasium: their prompts, episodes with written turns, and what they refuse."""

from __future__ import annotations

import ast
import asyncio
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from random import Random
from typing import Any

import gymnasium
import pytest
import reasoning_gym

from hybridengine.environments.child import different_rows
from hybridengine.environments.environment import Environment, Prompt, load_environment
from hybridengine.environments.gymnasium import plain_text
from hybridengine.environments.reasoning_gym import ReasoningGym
from hybridengine.episodes.client import Client, EpisodeError, Result, Row
from hybridengine.errors import DataError
from tests.unit.byte_episodes import played


def first_prompts(environment: Environment, count: int, seed: int = 0) -> list[Prompt]:
    return [*islice(environment.prompts(seed, 100), count)]


def play(environment: Environment, prompt: Prompt, *turns: str, **limits: int) -> Any:
    return asyncio.run(played(environment, prompt, turns, **limits))


# ---- reasoning-gym ----


@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "spell_backward", "base_conversion"])
def test_a_right_answer_of_a_dataset_is_rewarded_and_a_wrong_one_as_the_dataset_says(dataset: str) -> None:
    environment = load_environment(f"reasoning_gym/{dataset}", {}, {"instructions": "Think."})
    source = reasoning_gym.create_dataset(dataset, seed=0, size=100)
    for number, prompt in enumerate(first_prompts(environment, 3)):
        entry = source[number]
        assert prompt.prompt == [
            {"role": "system", "content": "Think."},
            {"role": "user", "content": entry["question"]},
        ]
        for text, answer in (
            (f"\n {entry['answer']} \n", entry["answer"]),
            (f"Well.\n<answer>{entry['answer']}</answer>", entry["answer"]),
            ("no idea", "no idea"),
        ):
            result, _ = play(environment, prompt, text)
            score = source.score_answer(answer=answer, entry=entry)
            assert result.reward == score
            assert result.metrics == {"tries": 1, "solved": float(score == 1.0), "unread": 0}
        assert source.score_answer(answer=entry["answer"], entry=entry) == 1.0


def test_an_answer_for_which_the_dataset_raises_is_wrong_and_may_be_corrected() -> None:
    environment = load_environment("reasoning_gym/prime_factorization", {}, {"tries": 2})
    (prompt,) = first_prompts(environment, 1)
    entry = reasoning_gym.create_dataset("prime_factorization", seed=0, size=100)[0]
    with pytest.raises(ValueError, match="invalid literal for int"):
        reasoning_gym.create_dataset("prime_factorization").score_answer(answer="I do not know", entry=entry)
    result, _ = play(environment, prompt, "I do not know", entry["answer"])
    assert (result.reward, result.metrics) == (1.0, {"tries": 2, "solved": 1.0, "unread": 1})
    result, _ = play(environment, prompt, "two", "three")
    assert (result.reward, result.metrics) == (0.0, {"tries": 2, "solved": 0.0, "unread": 2})


def test_a_dataset_that_takes_no_large_size_has_many_rows() -> None:
    environment = load_environment("reasoning_gym/word_ladder", {}, {})
    with pytest.raises(ValueError, match="too large"):
        reasoning_gym.create_dataset("word_ladder", size=40_000)
    assert isinstance(environment, ReasoningGym) and len(environment._largest(7, 40_000)) == 20_000
    source = reasoning_gym.create_dataset("word_ladder", seed=7_000_021, size=20_000)
    for number, prompt in zip(range(3), environment.prompts(7, 40_000), strict=False):
        asked: Any = prompt.prompt[-1]
        assert asked["content"] == source[number]["question"]


@pytest.mark.parametrize("seed", [4295, 2**31 - 1])
def test_seeds_of_rows_have_32_bits(seed: int) -> None:
    """NumPy takes no others, by which some datasets draw."""
    environment = load_environment("reasoning_gym/pool_matrix", {}, {})
    assert next(iter(environment.prompts(seed, 2))) != next(iter(environment.prompts(seed + 1, 2)))


def test_an_answer_that_would_end_the_process_is_wrong() -> None:
    environment = load_environment("reasoning_gym/n_queens", {}, {})
    (prompt,) = first_prompts(environment, 1)
    result, _ = play(environment, prompt, "exit()")
    assert (result.reward, result.metrics) == (0.0, {"tries": 1, "solved": 0.0, "unread": 1})


def test_a_mixture_of_datasets_is_played() -> None:
    mixture = [{"name": name, "weight": 1, "config": {}} for name in ("chain_sum", "spell_backward")]
    environment = load_environment("reasoning_gym/composite", {"datasets": mixture}, {})
    prompts = first_prompts(environment, 10)
    sources = {ast.literal_eval(one.answer["entry"])["metadata"]["source_dataset"] for one in prompts}
    assert sources == {"chain_sum", "spell_backward"}
    assert [play(environment, one, one.answer["answer"])[0].reward for one in prompts] == [1.0] * 10
    wrong = {"datasets": [{"name": "chain_sum"}]}
    with pytest.raises(DataError, match=r"refuses its options \(TypeError: .*missing 2 required"):
        load_environment("reasoning_gym/composite", wrong, {})


def test_an_entry_travels_with_its_row() -> None:
    """Some datasets take seconds for one, or make another one in each process."""
    environment = load_environment("reasoning_gym/chain_sum", {}, {})
    (prompt,) = first_prompts(environment, 1, seed=3)
    entry, asked = ast.literal_eval(prompt.answer["entry"]), prompt.prompt[-1]
    assert asked == {"role": "user", "content": entry["question"]}
    prompt.answer["entry"] = repr(entry | {"answer": "none"})
    assert play(environment, prompt, "none")[0].reward == 1.0


def test_numbers_and_texts_of_numpy_in_an_entry_become_those_of_python() -> None:
    environment = load_environment("reasoning_gym/knights_knaves", {}, {})
    (prompt,) = first_prompts(environment, 1)
    source = reasoning_gym.create_dataset("knights_knaves", seed=0, size=100)[0]
    assert "np.str_" in repr(source)
    assert ast.literal_eval(prompt.answer["entry"]) == source
    assert play(environment, prompt, source["answer"])[0].reward == 1.0


def test_an_entry_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(reasoning_gym.create_dataset("chain_sum", seed=0, size=1))
    monkeypatch.setattr(kind, "__getitem__", lambda *_: {"question": "?", "answer": "!", "metadata": kind})
    environment = load_environment("reasoning_gym/chain_sum", {}, {})
    with pytest.raises(DataError, match="has a problem that is not made of numbers, texts and collections"):
        first_prompts(environment, 1)


def test_a_wrong_answer_may_be_corrected() -> None:
    environment = load_environment("reasoning_gym/chain_sum", {}, {"tries": 3, "feedback": "No."})
    (prompt,) = first_prompts(environment, 1)
    right = prompt.answer["answer"]
    result, read = play(environment, prompt, "1e9", right)
    assert (result.reward, result.metrics, read) == (
        1.0,
        {"tries": 2, "solved": 1.0, "unread": 0},
        ["{user}No."],
    )
    result, read = play(environment, prompt, "1e9", "2e9", "3e9")
    assert (result.metrics, read) == ({"tries": 3, "solved": 0.0, "unread": 0}, ["{user}No."] * 2)


@pytest.mark.parametrize("room", [0, 2, 8, 9], ids=lambda room: f"{room}-bytes-after-an-answer")
def test_an_answer_without_room_for_another_is_the_last(room: int) -> None:
    """The feedback has 9 bytes, after which none is left for a second answer."""
    environment = load_environment("reasoning_gym/chain_sum", {}, {"tries": 3, "feedback": "No."})
    (prompt,) = first_prompts(environment, 1)
    result, read = play(environment, prompt, "1e9", max_tokens=3 + room)
    assert (result.metrics, read) == ({"tries": 1, "solved": 0.0, "unread": 0}, [])
    right = prompt.answer["answer"]
    result, read = play(environment, prompt, "1e9", right, max_tokens=3 + 9 + len(right))
    assert (result.reward, result.metrics) == (1.0, {"tries": 2, "solved": 1.0, "unread": 0})
    result, read = play(environment, prompt, "1e9", "2e9", max_tokens=3 + 9 + 3 + room)
    assert (result.metrics, read) == ({"tries": 2, "solved": 0.0, "unread": 0}, ["{user}No."])


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
