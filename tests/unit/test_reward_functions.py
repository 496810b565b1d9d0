"""Several functions and many rows: parts, processes, failures, weighted sums, and counters."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from hybridengine.config.reward_sections import RewardSection, TermSection
from hybridengine.data import rewards
from hybridengine.data.rewards import (
    RewardFunctions,
    check_reward_functions,
    combine_scores,
    reward_texts,
)
from hybridengine.data.tasks import arithmetic_reward
from hybridengine.errors import DataError

CASES = "tests.unit.reward_cases"
NAN = float("nan")


@pytest.fixture
def functions() -> Iterator[Callable[..., RewardFunctions]]:
    """Return a function that creates the functions of a section `reward`; end their processes afterwards."""
    made: list[RewardFunctions] = []

    def make(function: str | None = None, terms: dict[str, tuple[str, float]] | None = None, **options: Any):
        if terms:
            options["terms"] = {
                name: TermSection(function=f"{CASES}:{path}", weight=weight)
                for name, (path, weight) in terms.items()
            }
        if function:
            options["function"] = f"{CASES}:{function}"
        made.append(RewardFunctions("reward", RewardSection(**options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def columns(*responses: str) -> dict[str, list[str]]:
    return {"responses": list(responses), "answers": ["1"] * len(responses)}


def listed(values: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def test_rows_go_in_parts_and_keep_their_order(functions):
    one = functions("call_sizes", rows_per_call=3)
    result = one.score(columns(*"abcdefgh"))
    assert result["scores"].tolist() == [3, 3, 3, 3, 3, 3, 2, 2]
    assert result["scores"].dtype == torch.float32
    assert result["dropped"].tolist() == [False] * 8
    assert set(result.keys()) == {"scores", "dropped"}
    assert one.score(columns()).batch_size == torch.Size([0])
    metrics = one.take_metrics()
    assert metrics.pop("reward/call_s") > 0
    assert metrics == {
        "reward/calls": 3.0,
        "reward/failures": 0.0,
        "reward/timeouts": 0.0,
        "reward/retries": 0.0,
        "reward/dropped_rows": 0.0,
    }


def test_processes_work_at_the_same_time(functions, tmp_path):
    """A call returns once other calls have arrived, which would never happen one after another."""
    one = functions("meets_others", rows_per_call=1, num_processes=3)
    result = one.score({"responses": list("abcdef"), "answers": [str(tmp_path)] * 6})
    assert len(set(result["scores"].tolist())) == 3


class InThisProcess:
    """Replaces `RewardProcess`: the sum of a response's and an answer's number, one call at a time."""

    def __init__(self, path: str, **options: Any) -> None:
        self._is_busy = False

    def start(self) -> tuple[str, ...]:
        return "responses", "answers"

    def call(self, given: dict[str, list[str]], rows: Sequence[int]) -> list[float]:
        assert not self._is_busy
        self._is_busy = True
        time.sleep(0)
        texts = zip(given["responses"], given["answers"], rows, strict=True)
        scores = [int(response) + 1000.0 * int(answer) + 1e5 * row for response, answer, row in texts]
        self._is_busy = False
        return scores


@settings(max_examples=40)
@given(
    num_rows=st.integers(0, 40), per_call=st.integers(1, 50), num_processes=st.integers(1, 4), data=st.data()
)
def test_the_cut_into_parts_never_matters(num_rows, per_call, num_processes, data):
    rows = data.draw(st.permutations(range(num_rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards, "RewardProcess", InThisProcess)
        section = RewardSection(rows_per_call=per_call, num_processes=num_processes)
        one = RewardFunctions("reward", section)
        given_columns = {"responses": [str(row) for row in range(num_rows)], "answers": ["7"] * num_rows}
        result = one.score(given_columns, rows)
    assert result["scores"].tolist() == [number + 7000.0 + 1e5 * row for number, row in enumerate(rows)]
    assert one.take_metrics()["reward/calls"] == math.ceil(num_rows / per_call)


def test_a_failure_ends_the_scoring_by_default(functions):
    one = functions("fails_for_some", rows_per_call=2, num_processes=2)
    with pytest.raises(
        DataError, match=r"^reward\.function=tests\.unit\.reward_cases:fails_for_some, rows 12 to 13"
    ):
        one.score(columns("1", "2", "x", "4", "y", "z"), range(10, 16))
    assert one.score(columns("1", "2"))["scores"].tolist() == [1.0, 2.0]


def test_retries_call_again_and_are_counted(functions, caplog):
    one = functions("fails_at_first", rows_per_call=2, on_failure="retry", retries=1)
    with caplog.at_level(logging.WARNING):
        assert one.score(columns("1", "2", "3"))["scores"].tolist() == [1.0, 2.0, 3.0]
    metrics = one.take_metrics()
    assert metrics.pop("reward/call_s") > 0
    assert metrics == {
        "reward/calls": 4.0,
        "reward/failures": 2.0,
        "reward/timeouts": 0.0,
        "reward/retries": 2.0,
        "reward/dropped_rows": 0.0,
    }
    assert set(one.take_metrics().values()) == {0.0}
    assert [record.getMessage().partition("=")[0] for record in caplog.records] == [
        "called again, 1 more at most: reward.function"
    ] * 2


def test_retries_end_with_the_failure(functions, caplog):
    one = functions("fails_for_some", on_failure="retry")
    with pytest.raises(DataError, match="could not convert string to float: 'bad'"):
        one.score(columns("1", "bad"))
    assert caplog.text.count("called again") == 2
    metrics = one.take_metrics()
    counted = [metrics[f"reward/{count}"] for count in ("calls", "failures", "retries", "dropped_rows")]
    assert counted == [3.0, 3.0, 2.0, 0.0], "what ended the scoring too"


@pytest.mark.parametrize("retries", [None, 1])
def test_rows_of_a_failed_call_are_dropped_and_no_others(functions, caplog, retries):
    one = functions("hangs", rows_per_call=2, on_failure="drop", retries=retries, timeout_s=1.5)
    result = one.score(columns("a", "b", "c", "hang", "e"))
    assert result["dropped"].tolist() == [False, False, True, True, False]
    scores = listed(result["scores"])
    assert scores[2:4] == [None, None]
    assert all(scores[row] is not None for row in (0, 1, 4))
    metrics = one.take_metrics()
    assert 1.5 * (1 + (retries or 0)) < metrics.pop("reward/call_s") < 60
    assert metrics == {
        "reward/calls": 3.0 + (retries or 0),
        "reward/failures": 1.0 + (retries or 0),
        "reward/timeouts": 1.0 + (retries or 0),
        "reward/retries": retries or 0.0,
        "reward/dropped_rows": 2.0,
    }
    assert "2 rows dropped: reward.function=" in caplog.text


def test_terms_are_weighted_and_each_is_kept(functions):
    one = functions(
        terms={"length": ("lengths", -0.5), "value": ("sum_of_both", 3.0), "seen": ("lengths", 0.0)}
    )
    assert set(one.start()) == {"responses", "answers"}
    result = one.score(columns("1", "22", "-333"))
    assert result["reward/length"].tolist() == [1, 2, 4] == result["reward/seen"].tolist()
    assert result["reward/value"].tolist() == [1.5, 22.5, -332.5]
    assert result["scores"].tolist() == [4.0, 66.5, -999.5]
    assert result["dropped"].tolist() == [False, False, False]
    assert one.take_metrics()["reward/calls"] == 3.0


def test_a_term_drops_its_rows_from_the_sum_unless_it_has_no_weight(functions):
    for weight, dropped in ((0.25, True), (0.0, False)):
        one = functions(
            terms={"length": ("lengths", 2.0), "value": ("fails_for_some", weight)},
            on_failure="drop",
            rows_per_call=1,
        )
        result = one.score(columns("1", "xx"))
        assert listed(result["reward/value"]) == [1.0, None]
        assert result["reward/length"].tolist() == [1.0, 2.0]
        assert listed(result["scores"]) == [2.0 + weight, None if dropped else 4.0]
        assert result["dropped"].tolist() == [False, dropped]
        assert one.take_metrics()["reward/dropped_rows"] == 1.0


def test_a_term_is_named_in_its_failures(functions):
    one = functions(terms={"good": ("lengths", 1.0), "bad": ("fails_for_some", 1.0)})
    with pytest.raises(
        DataError,
        match=r"^reward\.terms\.bad\.function=tests\.unit\.reward_cases:fails_for_some, row 5: raised",
    ):
        one.score(columns("x"), [5])


finite = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(finite, st.lists(st.one_of(finite, st.none()), min_size=4, max_size=4)), max_size=4)
)
def test_combined_scores_are_weighted_sums_in_float64(terms):
    named = {f"t{number}": term for number, term in enumerate(terms)}
    rows = {
        name: torch.tensor([NAN if s is None else s for s in scores]) for name, (_, scores) in named.items()
    }
    result = combine_scores(
        TensorDict(rows, batch_size=[4]), None, {name: weight for name, (weight, _) in named.items()}
    )
    for row in range(4):
        total: float | None = 0.0
        for weight, scores in named.values():
            if weight != 0.0:
                score = scores[row]
                total = None if total is None or score is None else total + weight * score
        assert bool(result["dropped"][row]) == (total is None)
        assert listed(result["scores"])[row] == (None if total is None else float(torch.tensor(total)))


def test_all_functions_that_cannot_be_loaded_are_named(functions):
    terms = {"a": ("lengths", 1.0), "b": ("no_such", 1.0), "c": ("wrong_order", 1.0), "d": ("one_list", 1.0)}
    section = RewardSection(
        terms={name: TermSection(function=f"{CASES}:{path}") for name, (path, _) in terms.items()},
        num_processes=3,
    )
    with pytest.raises(DataError, match="3 problems") as caught:
        check_reward_functions("cost", section)
    text = str(caught.value)
    assert "cost.terms.b.function=tests.unit.reward_cases:no_such cannot be imported" in text
    assert "multiple values for argument 'prompts'" in text
    assert "cost.terms.d.function=tests.unit.reward_cases:one_list takes (responses: 'Texts')" in text
    check_reward_functions("cost", section.model_copy(update={"terms": {"a": section.terms["a"]}}))


def test_the_demos_reward_is_what_it_is_without_a_process():
    answers, responses = ["6", "6", "6", "-12", "7"], ["11 6", "5", "is 06", "-12", ""]
    with RewardFunctions("reward", RewardSection()) as one:
        found = one.score({"responses": responses, "answers": answers})["scores"].tolist()
    assert found == arithmetic_reward(responses, answers) == [1.0, 0.0, 1.0, 1.0, 0.0]


class Letters:
    """Token n is the n-th letter; token 0 is special."""

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]:
        return [
            "".join(
                "<>" if token == 0 else chr(96 + token)
                for token in tokens
                if token or not skip_special_tokens
            )
            for tokens in sequences
        ]


def test_texts_are_cut_out_of_the_tokens():
    rollout = TensorDict(
        {
            "tokens": torch.tensor([[1, 2, 0, 3, 4, 0, 11], [0, 5, 6, 7, 8, 9, 10], [1, 1, 1, 1, 0, 12, 0]]),
            "prompt_lengths": torch.tensor([2, 3, 4]),
            "response_lengths": torch.tensor([4, 4, 0]),
            "answers": NonTensorStack("x", "y", "z"),
        },
        batch_size=[3],
    )
    names = ("responses", "answers", "response_lengths", "prompts", "prompt_lengths")
    assert reward_texts(rollout, Letters(), names) == {
        "responses": ["cd", "ghij", ""],
        "answers": ["x", "y", "z"],
        "response_lengths": [4, 4, 0],
        "prompts": ["ab", "<>ef", "aaaa"],
        "prompt_lengths": [2, 3, 4],
    }
    assert list(reward_texts(rollout, Letters(), ["responses"])) == ["responses"]
