"""Masks and statistics over valid tokens, compared with loops over Python floats."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from hybridengine.algorithms.masking import (
    check_shapes,
    masked_max,
    masked_sum,
    response_mask,
    whiten,
    zero_masked,
)

LENGTHS = torch.tensor([3, 0, 1, 5])
NAN = math.nan


def _values_and_mask() -> tuple[torch.Tensor, torch.Tensor]:
    """Return seeded values [4, 5] with NaN and inf wherever the mask is False, and the mask."""
    mask_BR = response_mask(LENGTHS, 5)
    values_BR = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 2
    values_BR[~mask_BR] = NAN
    values_BR[1, 2] = math.inf
    return values_BR, mask_BR


def _valid(values_BR: torch.Tensor) -> list[float]:
    return [values_BR[b, j].item() for b, length in enumerate(LENGTHS.tolist()) for j in range(length)]


def test_response_mask_marks_the_first_tokens_of_each_row() -> None:
    assert response_mask(torch.tensor([3, 0, 1, 4]), 4).tolist() == [
        [True, True, True, False],
        [False, False, False, False],
        [True, False, False, False],
        [True, True, True, True],
    ]
    assert response_mask(torch.zeros(0, dtype=torch.int64), 4).shape == (0, 4)


@pytest.mark.parametrize("lengths", [[5, 1], [-1, 2]])
def test_response_mask_refuses_lengths_outside_of_the_width(lengths: list[int]) -> None:
    with pytest.raises(AssertionError, match="must lie in 0 to 4"):
        response_mask(torch.tensor(lengths), 4)


def test_sum_and_max_see_only_valid_tokens() -> None:
    values_BR, mask_BR = _values_and_mask()
    valid = _valid(values_BR)
    assert len(valid) == 9
    assert masked_sum(values_BR, mask_BR).item() == pytest.approx(math.fsum(valid), rel=1e-12)
    assert masked_max(values_BR, mask_BR).item() == max(valid)
    assert masked_max(-values_BR.abs() - 1, mask_BR).item() == max(-abs(value) - 1 for value in valid)


def test_no_valid_token_gives_zero() -> None:
    values_BR, mask_BR = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_sum(values_BR, mask_BR).item() == 0.0
    assert masked_max(values_BR, mask_BR).item() == 0.0
    assert masked_max(values_BR[:, :0], mask_BR[:, :0]).item() == 0.0
    assert whiten(values_BR, mask_BR).tolist() == [[0.0] * 3] * 2


def test_masked_entries_get_exactly_zero_gradient_even_where_they_are_nan() -> None:
    values_BR = torch.tensor([[1.0, NAN, math.inf]], requires_grad=True)
    mask_BR = torch.tensor([[True, False, False]])
    zero_masked(values_BR, mask_BR).exp().square().sum().backward()
    assert values_BR.grad is not None
    assert values_BR.grad.tolist() == [[pytest.approx(2 * math.exp(2.0)), 0.0, 0.0]]


def test_whiten_against_the_statistics_module() -> None:
    values_BR, mask_BR = _values_and_mask()
    valid = _valid(values_BR)
    mean = statistics.fmean(valid)
    deviation = math.sqrt(statistics.pvariance(valid) + 1e-8)
    whitened_BR = whiten(values_BR, mask_BR)
    assert _valid(whitened_BR) == pytest.approx([(value - mean) / deviation for value in valid], rel=1e-12)
    assert whitened_BR[~mask_BR].tolist() == [0.0] * 11


def test_whiten_of_equal_values_or_of_one_token_is_zero() -> None:
    mask_BR = response_mask(torch.tensor([2, 1]), 2)
    assert whiten(torch.full((2, 2), 7.0), mask_BR).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    one_BR = response_mask(torch.tensor([1, 0]), 2)
    assert whiten(torch.full((2, 2), 7.0), one_BR).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_shapes_that_would_broadcast_are_refused() -> None:
    mask_BR = response_mask(torch.tensor([2, 1]), 2)
    with pytest.raises(AssertionError, match=r"values_BR.*\(2, 1\)"):
        check_shapes(values_BR=torch.zeros(2, 1), mask_BR=mask_BR)
    with pytest.raises(AssertionError, match="must be bool"):
        check_shapes(values_BR=torch.zeros(2, 2), mask_BR=mask_BR.float())
