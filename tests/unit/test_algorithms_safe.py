"""Safe-RLHF: combined advantages compared with Python floats, the multiplier's step with autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.algorithms.advantages import safe_advantages
from hybridengine.algorithms.masking import response_mask
from hybridengine.drivers.safe_rlhf import SafeRlhf
from hybridengine.errors import DataError

LENGTHS = [3, 0, 1]


@pytest.mark.parametrize("multiplier", [0.0, 0.25, 1.0, 40.0])
def test_advantages_against_loops(multiplier: float) -> None:
    mask_BR = response_mask(torch.tensor(LENGTHS), 3)
    generator = torch.Generator().manual_seed(1)
    reward_BR, cost_BR = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator)
    for column_BR in (reward_BR, cost_BR):
        column_BR[~mask_BR] = math.nan
    combined_BR = safe_advantages(reward_BR, cost_BR.requires_grad_(), mask_BR, multiplier)
    assert not combined_BR.requires_grad
    for b, length in enumerate(LENGTHS):
        expected = [
            (reward_BR[b, j].item() - multiplier * cost_BR[b, j].item()) / (1 + multiplier)
            for j in range(length)
        ]
        assert combined_BR[b].tolist() == pytest.approx(expected + [0.0] * (3 - length), rel=1e-12)


def test_advantages_refuse_columns_that_would_broadcast() -> None:
    with pytest.raises(AssertionError, match=r"cost_advantages_BR.*\(2, 1\)"):
        safe_advantages(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool), 1.0)


@given(
    log_value=st.floats(-5, 1.5), mean_cost=st.floats(-20, 20), limit=st.floats(-5, 5), lr=st.floats(1e-3, 1)
)
@settings(deadline=None, max_examples=30)
def test_update_is_an_sgd_step_of_torch(log_value: float, mean_cost: float, limit: float, lr: float) -> None:
    parameter = torch.tensor(log_value, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=lr)
    (-(mean_cost - limit) * parameter.exp()).backward()
    optimizer.step()
    algorithm = SafeRlhf(cost_limit=limit, multiplier_lr=lr, max_log_multiplier=2.0)
    updated = algorithm.updated_log_multiplier(log_value, mean_cost)
    assert updated == pytest.approx(min(parameter.item(), 2.0), rel=1e-12, abs=1e-12)


def test_multiplier_rises_over_the_limit_to_its_bound_and_falls_below_it() -> None:
    algorithm = SafeRlhf(cost_limit=1.0, multiplier_lr=0.1, max_log_multiplier=0.5)
    assert algorithm.updated_log_multiplier(0.0, 1.0) == 0.0
    assert algorithm.updated_log_multiplier(0.0, 2.0) == pytest.approx(0.1)
    assert algorithm.updated_log_multiplier(0.0, -2.0) == pytest.approx(-0.3)
    pressed = 0.0
    for _ in range(100):
        pressed = algorithm.updated_log_multiplier(pressed, 3.0)
    assert pressed == 0.5
    assert algorithm.updated_log_multiplier(pressed, 0.0) == pytest.approx(0.5 - 0.1 * math.exp(0.5))


@pytest.mark.parametrize("cost", [math.nan, math.inf, -math.inf])
def test_a_cost_that_is_no_number_is_refused(cost: float) -> None:
    with pytest.raises(DataError, match=r"mean_cost=-?(nan|inf) must be a finite number"):
        SafeRlhf().updated_log_multiplier(0.0, cost)
