"""Environments of reasoning-gym: their prompts, and episodes with written turns."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import reasoning_gym

from hybridengine.environments.environment import load_environment
from hybridengine.environments.reasoning_gym import ReasoningGym
from hybridengine.errors import DataError
from tests.unit.byte_episodes import first_prompts, play


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
