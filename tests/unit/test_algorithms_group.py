"""GRPO, Dr.GRPO and RLOO compared with loops over Python floats; single members, ties, dropped rows, many ranks."""

from __future__ import annotations

import math
import statistics
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.algorithms.group_advantages import grpo, rloo
from hybridengine.algorithms.masking import over_tokens, response_mask
from tests.unit.test_algorithms_across import cut, joined, on_ranks

dr_grpo = partial(grpo, normalize_std=False)
ESTIMATORS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
Row = tuple[float, int, bool]
"""(score, group, True if kept)."""

ROWS: list[Row] = [
    (1.0, 3, True),
    (0.25, 0, True),
    (-2.0, 3, True),
    (math.nan, 3, False),
    (4.5, 0, True),
    (7.0, 5, True),
    (0.75, 0, True),
    (9.0, 0, False),
    (0.5, 3, True),
    (math.nan, 6, False),
]
"""Group 5 has one member, group 6 has no kept row, groups 1, 2 and 4 do not exist."""


def _expected(rows: list[Row], name: str) -> list[float]:
    advantages = []
    for number, (score, group, keep) in enumerate(rows):
        peers = [(i, s) for i, (s, g, k) in enumerate(rows) if g == group and k]
        if not keep or len(peers) == 1:
            advantages.append(0.0)
            continue
        scores = [s for _, s in peers]
        difference = score - math.fsum(scores) / len(scores)
        if name == "grpo":
            difference /= statistics.stdev(scores) + 1e-6
        elif name == "rloo":
            others = [s for i, s in peers if i != number]
            difference = score - math.fsum(others) / len(others)
        advantages.append(difference)
    return advantages


def _columns(
    rows: list[Row], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.tensor([score for score, _, _ in rows], dtype=dtype),
        torch.tensor([group for _, group, _ in rows], dtype=torch.int64),
        torch.tensor([keep for _, _, keep in rows], dtype=torch.bool),
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_against_loops(name: str) -> None:
    advantages_B = ESTIMATORS[name](*_columns(ROWS))
    assert advantages_B.tolist() == pytest.approx(_expected(ROWS, name), rel=1e-12)
    assert [advantages_B[row].item() for row in (3, 5, 7, 9)] == [0.0] * 4


def test_by_hand() -> None:
    scores_B, groups_B = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 0])
    assert dr_grpo(scores_B, groups_B).tolist() == [-2.0, -1.0, 3.0]
    assert rloo(scores_B, groups_B).tolist() == [-3.0, -1.5, 4.5]
    assert grpo(scores_B, groups_B).tolist() == pytest.approx(
        [x / math.sqrt(7) for x in (-2, -1, 3)], rel=1e-6
    )


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("score", [0.1, -1e6 / 3, 0.0])
def test_equal_scores_give_exactly_zero(name: str, dtype: torch.dtype, score: float) -> None:
    """The mean of seven times 0.1 is not 0.1 in floating point; a division by 1e-6 would show the difference."""
    rows: list[Row] = [(score, group, True) for group in [0] * 7 + [1] * 3]
    assert ESTIMATORS[name](*_columns(rows, dtype)).tolist() == [0.0] * 10


@pytest.mark.parametrize("name", ESTIMATORS)
def test_all_rows_dropped_and_no_rows_at_all(name: str) -> None:
    dropped: list[Row] = [(math.nan, 0, False), (math.inf, 0, False), (1.0, 1, False)]
    assert ESTIMATORS[name](*_columns(dropped)).tolist() == [0.0] * 3
    assert ESTIMATORS[name](*_columns([])).tolist() == []


@pytest.mark.parametrize("name", ESTIMATORS)
def test_float32_scores_stay_float32_without_gradient(name: str) -> None:
    scores_B, groups_B, keep_B = _columns(ROWS, torch.float32)
    advantages_B = ESTIMATORS[name](scores_B.requires_grad_(), groups_B.int(), keep_B)
    assert advantages_B.dtype == torch.float32
    assert not advantages_B.requires_grad
    assert advantages_B.tolist() == pytest.approx(_expected(ROWS, name), rel=1e-6)


scores = st.floats(-100, 100, width=32)
rows_with_owners = st.lists(
    st.tuples(scores | st.integers(-2, 2).map(float), st.integers(0, 4), st.booleans(), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(drawn=rows_with_owners)
@settings(deadline=None, max_examples=15)
def test_rows_anywhere_give_what_the_loops_give(name: str, drawn: list[tuple[float, int, bool, int]]) -> None:
    """Rows of one group are on several ranks, in any order, and some ranks have no rows."""
    rows: list[Row] = [(score if keep else math.nan, group, keep) for score, group, keep, _ in drawn]
    scores_B, groups_B, keep_B = _columns(rows)
    places = cut([owner for *_, owner in drawn])
    parts = on_ranks(
        places,
        lambda part, across: ESTIMATORS[name](scores_B[part], groups_B[part], keep_B[part], across),
    )
    whole_B = ESTIMATORS[name](scores_B, groups_B, keep_B)
    torch.testing.assert_close(joined(places, parts), whole_B, rtol=1e-6, atol=1e-6)
    assert whole_B.tolist() == pytest.approx(_expected(rows, name), rel=1e-6, abs=1e-6)


def test_advantages_of_a_row_reach_its_valid_tokens_only() -> None:
    mask_BR = response_mask(torch.tensor([2, 0, 3]), 3)
    spread_BR = over_tokens(torch.tensor([1.5, math.nan, -2.0]), mask_BR)
    assert spread_BR.tolist() == [[1.5, 1.5, 0.0], [0.0] * 3, [-2.0] * 3]


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"one entry for each of 3 rows.*values_B.*\(2,\)"):
        grpo(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(AssertionError, match="numbered from 0"):
        rloo(torch.zeros(2), torch.tensor([0, -1]))
    with pytest.raises(AssertionError, match="numbered by integers"):
        rloo(torch.zeros(2), torch.zeros(2))
    with pytest.raises(AssertionError, match="must be bool"):
        dr_grpo(torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(2))
