"""Arguments and results that a reward function may have, without a process around it."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.data.reward_child import LARGEST_SCORE, call_function, wanted_columns
from hybridengine.data.reward_process import checked_reply
from hybridengine.errors import DataError

OFFERED = ("prompts", "response_lengths")


def reply(result: Any, num_rows: int = 3) -> tuple:
    rows = [f"response {row}" for row in range(num_rows)]
    return call_function(lambda responses, answers: result, {"responses": rows, "answers": rows}, [])


@pytest.mark.parametrize(
    "result",
    [
        [1, 0, -2],
        (1.0, 0.0, -2.0),
        iter([1.0, False, -2]),
        map(int, ["1", "0", "-2"]),
        [Fraction(1), Fraction(0), Fraction(-2)],
        np.array([1, 0, -2]),
        np.array([1.0, 0.0, -2.0], dtype=np.float16),
        [np.float32(1.0), np.int64(0), np.array(-2.0)],
        torch.tensor([1, 0, -2]),
        torch.tensor([1.0, 0.0, -2.0], dtype=torch.bfloat16),
        [torch.tensor(1.0), torch.tensor([0]), torch.tensor(-2, dtype=torch.int8)],
        {"a": 1, "b": 0, "c": -2}.values(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_iterable_of_real_numbers_is_a_list_of_scores(result):
    kind, scores = reply(result)
    assert (kind, scores) == ("scores", [1.0, 0.0, -2.0])
    assert {type(score) for score in scores} == {float}


@pytest.mark.parametrize(
    ("result", "row", "text"),
    [
        (np.array([1.0, np.nan, 0.0]), 1, "(nan), a float64; return a finite number"),
        (torch.tensor([1.0, 0.0, torch.inf]), 2, "returned tensor(inf), a Tensor; return a finite number"),
        ([1.0, 2j, 0.0], 1, "returned 2j, a complex;"),
        ([[1.0, 2.0], 1.0, 0.0], 0, "returned [1.0, 2.0], a list;"),
        (torch.ones(3, 2), 0, "returned tensor([1., 1.]), a Tensor;"),
        ([1.0, 0.0, b"1"], 2, "returned b'1', a bytes;"),
        (torch.tensor(1.0), None, "raised TypeError: iteration over a 0-d tensor"),
        (np.float64(1.0), None, "returned"),
        ({1.0, 2.0, 3.0}, None, "a set; return a list with one number for each response"),
        (torch.ones(2), None, "returned 2 scores for 3 responses; return one for each"),
    ],
)
def test_anything_else_is_refused_with_its_row(result, row, text):
    kind, found, at, _ = reply(result)
    assert (kind, at) == ("raised" if "raised" in text else "wrong", row)
    assert text in found


def test_an_endless_result_is_not_read_to_its_end():
    def endless(responses, answers):
        while True:
            yield 1.0

    kind, text, row, _ = call_function(endless, {"responses": ["a", "b"], "answers": ["a", "b"]}, [])
    assert (kind, row) == ("wrong", None)
    assert text == "returned more scores than the 2 responses; return one for each"


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_scores_arrive_unchanged(scores):
    assert reply(scores, len(scores)) == ("scores", scores)


def test_the_largest_score_is_that_of_a_float32():
    assert torch.finfo(torch.float32).max == LARGEST_SCORE
    assert reply([LARGEST_SCORE, -LARGEST_SCORE, 0.0])[0] == "scores"
    assert reply([np.nextafter(LARGEST_SCORE, np.inf), 0.0, 0.0])[2] == 0


def plain(responses, answers): ...
def any_names(completions, solutions): ...
def more(responses, answers, response_lengths, scale=2.0, *, prompts=()): ...
def everything(responses, answers, **columns): ...
def everything_positional(*lists): ...
def prompts_and_all(responses, answers, prompts, **columns): ...


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (plain, []),
        (any_names, []),
        (more, ["response_lengths", "prompts"]),
        (everything, ["prompts", "response_lengths"]),
        (everything_positional, []),
        (prompts_and_all, ["prompts", "response_lengths"]),
        (zip, []),  # has no signature
    ],
)
def test_columns_that_a_function_wants(function, columns):
    assert wanted_columns(function, OFFERED, "f") == columns


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda responses: None,
            "f takes (responses), and cannot be called with (responses, answers): too many",
        ),
        (lambda: None, "f takes (), and cannot be called with (responses, answers): too many"),
        (lambda responses, *, answers: None, "cannot be called with (responses, answers): too many"),
        (lambda prompts, responses: None, "(responses, answers, prompts=...): multiple values for argument"),
        (lambda responses, prompts: None, "(responses, answers, prompts=...): multiple values for argument"),
        (lambda answers, responses: None, "(responses, answers): responses come first; write"),
        (lambda a, responses: None, "(responses, answers): responses come first; write"),
        (lambda answers, b: None, "(responses, answers): responses come first; write"),
        (
            lambda a, b, c, prompts: None,
            "missing a required argument: 'c'; write function(responses, answers), and",
        ),
        (lambda a, b, prompts, /: None, "missing a required argument: 'prompts'"),
        (lambda a, b, *, x, y: None, "missing a required argument: 'x'"),
    ],
)
def test_functions_that_cannot_be_called(function, text):
    with pytest.raises(DataError, match=r"^f takes ") as caught:
        wanted_columns(function, OFFERED, "f")
    assert text in str(caught.value)
    assert str(caught.value).endswith(
        "write function(responses, answers), and after them any of prompts, response_lengths"
    )


@pytest.mark.parametrize(
    "line",
    [
        b"no JSON",
        b"[" * 100_000,
        b'["scores", [' + b"9" * 5000 + b"]]",
        b'["scores", [NaN]]',
        b'["scores", [1e39]]',
        b'["scores", [1]]',
        b'["scores", [1.0, 1.0]]',
        b'["raised", "text", 1, ""]',
        b'["raised", "text", -1, ""]',
        b'["loaded", ["secret"]]',
        b'{"scores": [1.0]}',
    ],
)
def test_a_line_that_is_no_reply_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        checked_reply(line, ["prompts"], 1)


@pytest.mark.parametrize(
    "sent",
    [["loaded", ["prompts"]], ["scores", [0.5]], ["raised", "text", 0, "trace"], ["wrong", "text", None, ""]],
)
def test_a_reply_is_returned_as_it_was_sent(sent: list[Any]) -> None:
    assert checked_reply(json.dumps(sent).encode(), ["prompts"], 1) == sent
