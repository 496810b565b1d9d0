"""PPO's losses: values and statistics against loops over Python floats, gradients against plain formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from hybridengine.algorithms.losses import (
    TokenLoss,
    TokenStats,
    entropy_bonus,
    global_token_mean,
    merge_stats,
    policy_loss,
    value_loss,
)
from hybridengine.algorithms.losses.policy import MAX_LOG_RATIO
from hybridengine.algorithms.masking import response_mask

LENGTHS = [5, 0, 1, 3, 4, 2]
WIDTH = 5
MASK_BR = response_mask(torch.tensor(LENGTHS), WIDTH)
CLIPS = [(0.2, 0.2), (0.2, 0.28), (0.5, 0.1)]


def _column(seed: int, scale: float = 1.0, garbage: float = math.nan) -> torch.Tensor:
    """Random float64 [B, R]; masked entries hold `garbage`."""
    generator = torch.Generator().manual_seed(seed)
    values_BR = torch.randn(MASK_BR.shape, dtype=torch.float64, generator=generator) * scale
    return values_BR.masked_fill(~MASK_BR, garbage)


def _policy_columns() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs that need gradient, old log-probs and advantages; ratios on both sides of every clip range."""
    old_BR = -_column(1).abs()
    log_probs_BR = (old_BR + _column(2, scale=0.7)).requires_grad_()
    return log_probs_BR, old_BR, _column(3)


def _valid(*columns: torch.Tensor) -> list[tuple[float, ...]]:
    """Valid tokens in order, one tuple of Python floats each."""
    places = [(b, j) for b, length in enumerate(LENGTHS) for j in range(length)]
    return [tuple(column[b, j].item() for column in columns) for b, j in places]


def _check(stats: TokenStats, expected_sums: dict[str, float], expected_maxima: dict[str, float]) -> None:
    assert {name: total.item() for name, total in stats.sums.items()} == pytest.approx(
        expected_sums, rel=1e-9
    )
    assert {name: v.item() for name, v in stats.maxima.items()} == pytest.approx(expected_maxima, rel=1e-9)
    assert not any(total.requires_grad for total in [*stats.sums.values(), *stats.maxima.values()])


@pytest.mark.parametrize(("clip_low", "clip_high"), CLIPS)
def test_policy_loss_value_and_stats(clip_low: float, clip_high: float) -> None:
    log_probs_BR, old_BR, advantages_BR = _policy_columns()
    loss = policy_loss(log_probs_BR, old_BR, advantages_BR, MASK_BR, clip_low, clip_high)
    total = low = high = kl1 = kl3 = ratios = largest = 0.0
    for new, old, advantage in _valid(log_probs_BR, old_BR, advantages_BR):
        ratio = math.exp(new) / math.exp(old)
        clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
        total -= min(ratio * advantage, clipped * advantage)
        low += advantage < 0 and ratio < 1 - clip_low
        high += advantage > 0 and ratio > 1 + clip_high
        kl1 += old - new
        kl3 += ratio - 1 - math.log(ratio)
        ratios += ratio
        largest = max(largest, ratio)
    assert low > 0
    assert high > 0
    assert loss.loss_sum.item() == pytest.approx(total, rel=1e-12)
    sums = {
        "actor/policy_loss": total,
        "actor/clip_fraction": low + high,
        "actor/clip_low_fraction": low,
        "actor/clip_high_fraction": high,
        "actor/approx_kl_k1": kl1,
        "actor/approx_kl_k3": kl3,
        "actor/ratio_mean": ratios,
    }
    _check(loss.stats, sums, {"actor/ratio_max": largest})


@pytest.mark.parametrize(("clip_low", "clip_high"), CLIPS)
def test_policy_gradient_is_zero_where_clipped_and_ratio_times_advantage_elsewhere(
    clip_low: float, clip_high: float
) -> None:
    log_probs_BR, old_BR, advantages_BR = _policy_columns()
    old_BR.requires_grad_()
    advantages_BR.requires_grad_()
    policy_loss(log_probs_BR, old_BR, advantages_BR, MASK_BR, clip_low, clip_high).loss_sum.backward()
    assert log_probs_BR.grad is not None
    assert old_BR.grad is None
    assert advantages_BR.grad is None
    gradients = [gradient for (gradient,) in _valid(log_probs_BR.grad)]
    expected = []
    for new, old, advantage in _valid(log_probs_BR, old_BR, advantages_BR):
        ratio = math.exp(new - old)
        clipped = ratio < 1 - clip_low if advantage < 0 else ratio > 1 + clip_high
        expected.append(0.0 if clipped else -ratio * advantage)
    assert gradients == pytest.approx(expected, rel=1e-12)
    assert log_probs_BR.grad[~MASK_BR].tolist() == [0.0] * (MASK_BR.numel() - sum(LENGTHS))


def test_policy_gradient_at_the_old_policy_is_the_plain_policy_gradient() -> None:
    """At pi = pi_old, PPO's first step is REINFORCE: the gradient of -A·log pi, unmasked formula, autograd."""
    full_BR = torch.ones(3, 4, dtype=torch.bool)
    generator = torch.Generator().manual_seed(7)
    logits_BRV = torch.randn(3, 4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    tokens_BR = torch.randint(6, (3, 4), generator=generator)
    advantages_BR = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    log_probs_BR = logits_BRV.log_softmax(-1).gather(-1, tokens_BR[..., None])[..., 0]
    (plain,) = torch.autograd.grad(-(advantages_BR * log_probs_BR).sum(), logits_BRV, retain_graph=True)
    loss = policy_loss(log_probs_BR, log_probs_BR.detach(), advantages_BR, full_BR)
    (ppo,) = torch.autograd.grad(loss.loss_sum, logits_BRV)
    torch.testing.assert_close(ppo, plain, rtol=1e-12, atol=1e-14)


def test_policy_loss_stays_finite_at_absurd_ratios() -> None:
    old_BR = torch.tensor([[-200.0, -1.0, -1.0]])
    log_probs_BR = torch.tensor([[-1.0, -200.0, -1.5]], requires_grad=True)
    advantages_BR = torch.tensor([[0.0, 1.0, -1.0]])
    loss = policy_loss(log_probs_BR, old_BR, advantages_BR, torch.ones(1, 3, dtype=torch.bool))
    assert loss.loss_sum.item() == pytest.approx(0.8 - math.exp(-MAX_LOG_RATIO), abs=1e-6)
    assert loss.stats.maxima["actor/ratio_max"].item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-4)
    loss.loss_sum.backward()
    assert log_probs_BR.grad is not None
    assert torch.isfinite(log_probs_BR.grad).all()


@pytest.mark.parametrize("clip_value", [0.2, 1.0, None])
def test_value_loss_value_stats_and_gradient(clip_value: float | None) -> None:
    old_BR, returns_BR = _column(4), _column(5)
    values_BR = (old_BR + _column(6, scale=0.8)).requires_grad_()
    loss = value_loss(values_BR, old_BR, returns_BR, MASK_BR, clip_value)
    total = clips = squares = 0.0
    gradients = []
    tokens = _valid(values_BR, old_BR, returns_BR)
    for value, old, target in tokens:
        limit = math.inf if clip_value is None else clip_value
        clipped = min(max(value, old - limit), old + limit)
        total += max((value - target) ** 2, (clipped - target) ** 2) / 2
        clips += (clipped - target) ** 2 > (value - target) ** 2
        squares += (value - target) ** 2
        gradients.append(0.0 if (clipped - target) ** 2 > (value - target) ** 2 else value - target)
    assert (clips > 0) == (clip_value is not None)
    assert loss.loss_sum.item() == pytest.approx(total, rel=1e-12)
    sums = {
        "critic/value_loss": total,
        "critic/clip_fraction": clips,
        "critic/squared_error": squares,
        "critic/value_mean": math.fsum(value for value, _, _ in tokens),
        "critic/return_mean": math.fsum(target for _, _, target in tokens),
    }
    _check(loss.stats, sums, {})
    loss.loss_sum.backward()
    assert values_BR.grad is not None
    assert [gradient for (gradient,) in _valid(values_BR.grad)] == pytest.approx(gradients, rel=1e-12)
    assert not values_BR.grad[~MASK_BR].any()


def test_value_clip_fraction_counts_no_rounding_noise() -> None:
    """Inside the range the clipped value is the value itself, so float32 counts nothing as clipped."""
    generator = torch.Generator().manual_seed(8)
    old_BR, values_BR, returns_BR = 0.19 * torch.rand(3, 64, 64, generator=generator)
    loss = value_loss(values_BR, old_BR, returns_BR, torch.ones(64, 64, dtype=torch.bool), clip_value=0.2)
    assert loss.stats.sums["critic/clip_fraction"].item() == 0.0


def test_entropy_bonus_lowers_the_loss_by_the_entropy() -> None:
    entropies_BR = _column(9).abs().requires_grad_()
    loss = entropy_bonus(entropies_BR, MASK_BR, coefficient=0.01)
    entropy = math.fsum(value for (value,) in _valid(entropies_BR))
    assert loss.loss_sum.item() == pytest.approx(-0.01 * entropy, rel=1e-12)
    _check(loss.stats, {"actor/entropy": entropy}, {})
    loss.loss_sum.backward()
    assert entropies_BR.grad is not None
    assert entropies_BR.grad.tolist() == (MASK_BR.double() * -0.01).tolist()


def _losses(columns: list[torch.Tensor], mask_BR: torch.Tensor) -> dict[str, TokenLoss]:
    return {
        "policy": policy_loss(columns[0], columns[1], columns[2], mask_BR),
        "value": value_loss(columns[0], columns[1], columns[2], mask_BR),
        "entropy": entropy_bonus(columns[0], mask_BR, 0.1),
    }


@pytest.mark.parametrize("name", ["policy", "value", "entropy"])
def test_no_valid_token_gives_zero_loss_with_zero_gradient(name: str) -> None:
    columns = [torch.full((2, 3), math.nan) for _ in range(3)]
    columns[0].requires_grad_()
    loss = _losses(columns, torch.zeros(2, 3, dtype=torch.bool))[name]
    assert loss.loss_sum.item() == 0.0
    loss.loss_sum.backward()
    assert columns[0].grad is not None
    assert columns[0].grad.tolist() == [[0.0] * 3] * 2
    assert set(loss.stats.metrics(0).values()) == {0.0}


@pytest.mark.parametrize("name", ["policy", "value", "entropy"])
def test_statistics_survive_an_in_place_division_of_the_loss(name: str) -> None:
    """Megatron's schedule divides the loss that it is given in place."""
    loss = _losses([_column(1), _column(2), _column(3)], MASK_BR)[name]
    before = {key: total.item() for key, total in loss.stats.sums.items()}
    loss.loss_sum.div_(1000)
    assert {key: total.item() for key, total in loss.stats.sums.items()} == before


Cut = list[list[list[int]]]


@pytest.mark.parametrize(
    "cut",
    [
        [[[0, 1, 2, 3, 4, 5]]],
        [[[0], [1], [2], [3], [4], [5]]],
        [[[0, 3], [1]], [[2, 4], [5]]],
    ],
    ids=["whole", "row by row", "two ranks of two micro-batches"],
)
def test_gradient_and_metrics_do_not_depend_on_how_rows_are_cut(cut: Cut) -> None:
    """A trainer that averages over micro-batches and ranks gets the gradient of the mean over all valid tokens."""
    num_tokens = sum(LENGTHS)
    reference_BR, old_BR, advantages_BR = _policy_columns()
    whole = policy_loss(reference_BR, old_BR, advantages_BR, MASK_BR) + entropy_bonus(
        -reference_BR, MASK_BR, 0.05
    )
    plain_mean = whole.loss_sum / num_tokens
    plain_mean.backward()

    log_probs_BR = reference_BR.detach().clone().requires_grad_()
    parts = []
    num_averaged_parts = len(cut) * len(cut[0])
    for rows in [rows for rank in cut for rows in rank]:
        mask_BR = MASK_BR[rows]
        loss = policy_loss(log_probs_BR[rows], old_BR[rows], advantages_BR[rows], mask_BR)
        loss = loss + entropy_bonus(-log_probs_BR[rows], mask_BR, 0.05)
        scaled = global_token_mean(loss.loss_sum, torch.tensor(num_tokens), num_averaged_parts)
        (scaled / num_averaged_parts).backward()
        parts.append(loss.stats)
    torch.testing.assert_close(log_probs_BR.grad, reference_BR.grad, rtol=1e-12, atol=1e-14)
    metrics = merge_stats(parts).metrics(num_tokens)
    assert metrics == pytest.approx(whole.stats.metrics(torch.tensor(num_tokens)), rel=1e-12)
    assert metrics["actor/policy_loss"] - 0.05 * metrics["actor/entropy"] == pytest.approx(plain_mean.item())
    ratios = [math.exp(new - old) for new, old in _valid(reference_BR, old_BR)]
    assert metrics["actor/ratio_max"] == pytest.approx(max(ratios))
    assert metrics["actor/ratio_mean"] == pytest.approx(sum(ratios) / num_tokens)


def test_global_token_mean_of_nothing_is_zero() -> None:
    assert global_token_mean(torch.tensor(0.0), 0, 3).item() == 0.0
    assert global_token_mean(torch.tensor(6.0), 4).item() == 1.5


def test_the_same_loss_twice_cannot_be_added() -> None:
    loss = entropy_bonus(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), 0.1)
    with pytest.raises(AssertionError, match="actor/entropy"):
        _ = loss + loss


@pytest.mark.parametrize("function", [policy_loss, value_loss])
def test_losses_refuse_columns_that_would_broadcast(function: Callable[..., TokenLoss]) -> None:
    with pytest.raises(AssertionError, match=r"\(2, 1\)"):
        function(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool))
