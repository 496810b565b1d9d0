"""Token rewards and GAE, compared with loops over Python floats."""

from __future__ import annotations

import math

import pytest
import torch

from hybridengine.algorithms.advantages import gae, length_adaptive_lambdas, token_rewards
from hybridengine.algorithms.masking import response_mask

LENGTHS = [4, 0, 1, 6, 3]
WIDTH = 6


def _seeded(seed: int, mask_BR: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return random [B, R] with NaN at masked entries, so that reading one of them shows in the result."""
    values_BR = torch.randn(mask_BR.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return values_BR.masked_fill(~mask_BR, math.nan).to(dtype)


def _discounted_sum_of_deltas(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> list[float]:
    """Return equation 16 as written, without recursion: A_j = sum over l of (gamma·lam)^l·delta_{j+l}."""
    after = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * v_next - v for r, v_next, v in zip(rewards, after, values, strict=True)]
    return [
        math.fsum((gamma * lam) ** (k - j) * deltas[k] for k in range(j, len(deltas)))
        for j in range(len(deltas))
    ]


def test_token_rewards_by_hand() -> None:
    mask_BR = response_mask(torch.tensor([3, 0, 1, 2]), 3)
    kl_BR = torch.tensor([[1.0, 2.0, 4.0], [9.0, 9.0, 9.0], [0.5, 9.0, 9.0], [-1.0, 3.0, 9.0]])
    rewards_BR = token_rewards(torch.tensor([1.0, 5.0, -2.0, 0.0]), kl_BR, mask_BR, kl_coefficient=0.5)
    assert rewards_BR.tolist() == [[-0.5, -1.0, -1.0], [0.0, 0.0, 0.0], [-2.25, 0.0, 0.0], [0.5, -1.5, 0.0]]


def test_token_rewards_ignore_what_is_masked_and_skip_holes() -> None:
    mask_BR = torch.tensor([[True, False, True, False]])
    kl_BR = torch.tensor([[0.25, math.nan, 0.5, math.inf]])
    rewards_BR = token_rewards(torch.tensor([3.0]), kl_BR, mask_BR, kl_coefficient=2.0)
    assert rewards_BR.tolist() == [[-0.5, 0.0, 2.0, 0.0]]


def test_token_rewards_refuse_scores_per_token() -> None:
    mask_BR = response_mask(torch.tensor([2, 2]), 2)
    with pytest.raises(AssertionError, match="one entry for each of"):
        token_rewards(torch.zeros(2, 2), torch.zeros(2, 2), mask_BR, 0.1)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (0.0, 0.5)])
def test_gae_against_the_sum_of_deltas(gamma: float, lam: float) -> None:
    mask_BR = response_mask(torch.tensor(LENGTHS), WIDTH)
    rewards_BR, values_BR = _seeded(2, mask_BR), _seeded(3, mask_BR)
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, mask_BR, gamma, lam)
    for b, length in enumerate(LENGTHS):
        values = values_BR[b, :length].tolist()
        expected = _discounted_sum_of_deltas(rewards_BR[b, :length].tolist(), values, gamma, lam)
        padding = [0.0] * (WIDTH - length)
        assert advantages_BR[b].tolist() == pytest.approx(expected + padding, rel=1e-12, abs=1e-14)
        returns = [advantage + value for advantage, value in zip(expected, values, strict=True)]
        assert returns_BR[b].tolist() == pytest.approx(returns + padding, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 2.0])
def test_lambdas_of_their_own_for_rows_of_each_length(alpha: float) -> None:
    """1 - 1/(alpha·l) counts valid tokens, not holes, and is 0 where it would be negative; VAPO, section 4.2."""
    mask_BR = response_mask(torch.tensor(LENGTHS), WIDTH)
    mask_BR[3, 1:3] = False
    lambdas_B = length_adaptive_lambdas(mask_BR, alpha)
    counts = [4, 0, 1, 4, 3]
    assert lambdas_B.tolist() == pytest.approx([max(0.0, 1 - 1 / (alpha * max(n, 1))) for n in counts])
    rewards_BR, values_BR = _seeded(2, mask_BR), _seeded(3, mask_BR)
    advantages_BR, _ = gae(rewards_BR, values_BR, mask_BR, 0.9, lambdas_B)
    for b, lam in enumerate(lambdas_B.tolist()):
        row = mask_BR[b]
        rewards, values = rewards_BR[b][row].tolist(), values_BR[b][row].tolist()
        expected = _discounted_sum_of_deltas(rewards, values, 0.9, lam)
        assert advantages_BR[b][row].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert not advantages_BR[b][~row].any()


def test_gae_with_lambda_one_returns_the_reward_to_go() -> None:
    """gamma = lambda = 1: the return is the plain sum of the remaining rewards, whatever the values are."""
    mask_BR = response_mask(torch.tensor([3, 1]), 3)
    rewards_BR = torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, 0.0]])
    values_BR = torch.tensor([[0.5, -3.0, 2.0], [1.0, 0.0, 0.0]])
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, mask_BR, gamma=1.0, lam=1.0)
    assert returns_BR.tolist() == [[7.0, 6.0, 4.0], [8.0, 0.0, 0.0]]
    assert advantages_BR.tolist() == [[6.5, 9.0, 2.0], [7.0, 0.0, 0.0]]


def test_gae_steps_over_holes() -> None:
    """A masked token between valid ones has no effect, as if it were cut out of the row."""
    mask_BR = torch.tensor([[True, False, True, True, False, True]])
    rewards_BR, values_BR = _seeded(4, mask_BR), _seeded(5, mask_BR)
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, mask_BR, 0.9, 0.7)
    values = values_BR[mask_BR].tolist()
    expected = _discounted_sum_of_deltas(rewards_BR[mask_BR].tolist(), values, 0.9, 0.7)
    assert advantages_BR[mask_BR].tolist() == pytest.approx(expected, rel=1e-12)
    assert advantages_BR[~mask_BR].tolist() == [0.0, 0.0]
    assert returns_BR[~mask_BR].tolist() == [0.0, 0.0]


def test_gae_of_float32_columns_stays_float32_and_has_no_gradient() -> None:
    mask_BR = response_mask(torch.tensor(LENGTHS), WIDTH)
    rewards_BR = _seeded(2, mask_BR, torch.float32)
    values_BR = _seeded(3, mask_BR, torch.float32).requires_grad_()
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, mask_BR, 0.99, 0.95)
    exact_BR, _ = gae(_seeded(2, mask_BR), _seeded(3, mask_BR), mask_BR, 0.99, 0.95)
    assert advantages_BR.dtype == returns_BR.dtype == torch.float32
    assert not advantages_BR.requires_grad
    assert not returns_BR.requires_grad
    torch.testing.assert_close(advantages_BR.double(), exact_BR, rtol=1e-5, atol=1e-6)
