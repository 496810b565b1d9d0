"""Discounted returns, REINFORCE++ and ReMax compared with sums over Python floats."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.algorithms.advantages import discounted_returns, reinforce_plus_plus, remax, token_rewards
from hybridengine.algorithms.masking import response_mask
from tests.unit.test_algorithms_across import cut, joined, on_ranks

Rows = list[list[float]]
"""Rewards of each row's valid tokens."""

ROWS: Rows = [[0.5, -1.0, 2.0, 0.25], [], [3.0], [0.0, 0.0, -4.0]]
WIDTH = 5


def _returns(rewards: list[float], gamma: float) -> list[float]:
    """Return G_j by its definition, term by term."""
    return [
        math.fsum(gamma ** (k - j) * rewards[k] for k in range(j, len(rewards))) for j in range(len(rewards))
    ]


def _whitened(rows: Rows, gamma: float) -> Rows:
    returns = [_returns(row, gamma) for row in rows]
    tokens = [value for row in returns for value in row]
    if not tokens:
        return returns
    mean, deviation = statistics.fmean(tokens), math.sqrt(statistics.pvariance(tokens) + 1e-8)
    return [[(value - mean) / deviation for value in row] for row in returns]


def _padded(rows: Rows) -> list[list[float]]:
    return [row + [0.0] * (WIDTH - len(row)) for row in rows]


def _columns(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards with NaN at masked entries, and the mask."""
    mask_BR = response_mask(torch.tensor([len(row) for row in rows], dtype=torch.int64), WIDTH)
    rewards_BR = torch.tensor(_padded(rows), dtype=torch.float64).reshape(len(rows), WIDTH)
    return rewards_BR.masked_fill(~mask_BR, math.nan), mask_BR


def _check(actual_BR: torch.Tensor, expected: Rows, tolerance: float = 1e-12) -> None:
    for actual, row in zip(actual_BR.tolist(), _padded(expected), strict=True):
        assert actual == pytest.approx(row, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns(gamma: float) -> None:
    _check(discounted_returns(*_columns(ROWS), gamma), [_returns(row, gamma) for row in ROWS])


def test_returns_step_over_holes() -> None:
    mask_BR = torch.tensor([[True, False, True, True, False]])
    rewards_BR = torch.tensor([[1.0, math.nan, 2.0, 4.0, math.inf]])
    assert discounted_returns(rewards_BR, mask_BR, 0.5).tolist() == [[3.0, 0.0, 4.0, 4.0, 0.0]]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(gamma: float) -> None:
    _check(reinforce_plus_plus(*_columns(ROWS), gamma), _whitened(ROWS, gamma))


def test_reinforce_plus_plus_of_equal_returns_or_of_nothing_is_zero() -> None:
    _check(reinforce_plus_plus(*_columns([[0.0, 0.0, 7.0], [7.0]])), [[0.0] * 3, [0.0]])
    _check(reinforce_plus_plus(*_columns([[7.0]])), [[0.0]])
    _check(reinforce_plus_plus(*_columns([[], []])), [[], []])


def test_a_dropped_row_changes_nothing_for_the_others() -> None:
    """Its score is NaN; without valid tokens the row is in no statistic."""
    rewards_BR, mask_BR = _columns(ROWS)
    keep_B = torch.tensor([True, True, False, True])
    rewards_BR[2] = math.nan
    advantages_BR = reinforce_plus_plus(rewards_BR, mask_BR & keep_B[:, None])
    _check(advantages_BR, _whitened([*ROWS[:2], [], ROWS[3]], 1.0))


def test_remax_is_the_reward_to_go_less_the_baseline() -> None:
    baselines = [1.5, math.nan, -2.0, 0.5]
    advantages_BR = remax(*_columns(ROWS), torch.tensor(baselines, dtype=torch.float64))
    expected = [
        [value - baseline for value in _returns(row, 1.0)]
        for row, baseline in zip(ROWS, baselines, strict=True)
    ]
    _check(advantages_BR, expected)
    with pytest.raises(AssertionError, match="one entry for each of 4 rows"):
        remax(*_columns(ROWS), torch.zeros(4, 5))


def test_remax_of_a_score_at_the_end_is_score_less_baseline_at_every_token() -> None:
    mask_BR = response_mask(torch.tensor([3, 1]), 3)
    rewards_BR = token_rewards(torch.tensor([2.0, 5.0]), torch.zeros(2, 3), mask_BR, 0.1)
    advantages_BR = remax(rewards_BR, mask_BR, torch.tensor([0.5, 6.0]))
    assert advantages_BR.tolist() == [[1.5, 1.5, 1.5], [-1.0, 0.0, 0.0]]


def test_no_gradient_and_the_rewards_dtype() -> None:
    rewards_BR, mask_BR = _columns(ROWS)
    rewards_BR = rewards_BR.float().requires_grad_()
    for advantages_BR in (
        discounted_returns(rewards_BR, mask_BR, 0.9),
        reinforce_plus_plus(rewards_BR, mask_BR),
        remax(rewards_BR, mask_BR, torch.zeros(4, dtype=torch.float64)),
    ):
        assert advantages_BR.dtype == torch.float32
        assert not advantages_BR.requires_grad


rewards = st.floats(-50, 50, width=32)
rows_with_owners = st.lists(
    st.tuples(st.lists(rewards, max_size=WIDTH), st.integers(0, 3)), min_size=1, max_size=8
)


@given(drawn=rows_with_owners, gamma=st.sampled_from([1.0, 0.97, 0.5]))
@settings(deadline=None, max_examples=15)
def test_reinforce_plus_plus_of_rows_anywhere(drawn: list[tuple[list[float], int]], gamma: float) -> None:
    rows = [row for row, _ in drawn]
    rewards_BR, mask_BR = _columns(rows)
    places = cut([owner for _, owner in drawn])
    parts = on_ranks(
        places,
        lambda part, across: reinforce_plus_plus(rewards_BR[part], mask_BR[part], gamma, across),
    )
    whole_BR = reinforce_plus_plus(rewards_BR, mask_BR, gamma)
    torch.testing.assert_close(joined(places, parts), whole_BR, rtol=1e-6, atol=1e-6)
    _check(whole_BR, _whitened(rows, gamma), tolerance=1e-6)
