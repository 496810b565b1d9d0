"""The policy loss and its clips: values and statistics compared with loops over floats, gradients with plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridengine.algorithms.kl import MAX_LOG_RATIO
from hybridengine.algorithms.losses.aggregation import Aggregation, LossStats, SummedLoss
from hybridengine.algorithms.losses.policy import policy_loss
from hybridengine.algorithms.masking import response_mask

LENGTHS = [5, 0, 1, 3, 4, 2]
WIDTH = 5
MASK_BR = response_mask(torch.tensor(LENGTHS), WIDTH)
PLACES = [(b, j) for b, length in enumerate(LENGTHS) for j in range(length)]

Clips = tuple[float, float, float | None]
CLIPS: list[Clips] = [
    (0.2, 0.2, None),
    (0.2, 0.28, None),
    (0.5, 0.1, None),
    (0.2, 0.2, 1.5),
    (0.2, 0.28, 1.05),
]
"""(low, high, dual); 1.05 lies inside the range."""
MODES = {
    "token": (Aggregation("token"), [1.0] * len(PLACES), len(PLACES)),
    "sequence": (Aggregation("sequence"), [1 / LENGTHS[b] for b, _ in PLACES], 5),
    "sequence_sum": (Aggregation("sequence_sum", divisor=8.0), [1 / 8.0] * len(PLACES), 5),
}
"""Weight of each token's loss in the sum, and the divisor of the sum."""


def _column(seed: int, scale: float = 1.0) -> Tensor:
    """Return random float64 [B, R]; masked entries are NaN."""
    generator = torch.Generator().manual_seed(seed)
    values_BR = torch.randn(MASK_BR.shape, dtype=torch.float64, generator=generator) * scale
    return values_BR.masked_fill(~MASK_BR, math.nan)


def _columns() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return new log-probs with gradients, old ones, advantages and weights; ratios are on all sides of every clip."""
    old_BR = -_column(1).abs()
    return (old_BR + _column(2, scale=0.9)).requires_grad_(), old_BR, _column(3), _column(4).abs() + 0.1


def _valid(*columns: Tensor) -> list[tuple[float, ...]]:
    return [tuple(column[place].item() for column in columns) for place in PLACES]


def _plain(new: Tensor, old: float, advantage: float, clips: Clips) -> Tensor:
    """Return the papers' formula for one token, in torch only for its gradient."""
    low, high, dual = clips
    ratio = torch.exp(new - old)
    clipped = torch.clamp(ratio, 1 - low, 1 + high)
    gain = min(ratio * advantage, clipped * advantage, key=Tensor.item)
    if dual is not None and advantage < 0:
        bound = torch.tensor(dual * advantage, dtype=torch.float64)
        gain = max(gain, bound, key=Tensor.item)
    return -gain


def _loss(aggregation: Aggregation, clips: Clips, columns: tuple[Tensor, ...], weighted: bool) -> SummedLoss:
    new_BR, old_BR, advantages_BR, weights_BR = columns
    low, high, dual = clips
    return policy_loss(
        new_BR,
        old_BR,
        advantages_BR,
        MASK_BR,
        low,
        high,
        dual_clip=dual,
        weights_BR=weights_BR if weighted else None,
        aggregation=aggregation,
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clips", CLIPS)
def test_value_and_gradient_against_the_plain_formula(clips: Clips, mode: str, weighted: bool) -> None:
    columns = _columns()
    aggregation, shares, _ = MODES[mode]
    loss = _loss(aggregation, clips, columns, weighted)
    total, gradients = 0.0, []
    for (new, old, advantage, weight), share in zip(_valid(*columns), shares, strict=True):
        leaf = torch.tensor(new, dtype=torch.float64, requires_grad=True)
        term = _plain(leaf, old, advantage, clips) * (weight if weighted else 1.0) * share
        total += term.item()
        gradients.append(torch.autograd.grad(term, leaf)[0].item() if term.requires_grad else 0.0)
    assert loss.loss_sum.item() == pytest.approx(total, rel=1e-12)
    for constant in columns[1:]:
        constant.requires_grad_()
    _loss(aggregation, clips, columns, weighted).loss_sum.backward()
    assert all(constant.grad is None for constant in columns[1:])
    gradient_BR = columns[0].grad
    assert gradient_BR is not None
    assert [gradient_BR[place].item() for place in PLACES] == pytest.approx(gradients, rel=1e-12)
    assert gradient_BR[~MASK_BR].tolist() == [0.0] * (MASK_BR.numel() - len(PLACES))


def _check(stats: LossStats, expected_means: dict[str, float]) -> None:
    assert stats.metrics(len(PLACES)) == pytest.approx(expected_means, rel=1e-9)
    values = [*stats.sums.values(), *stats.maxima.values(), *stats.counts.values()]
    assert not any(value.requires_grad for value in values)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clips", CLIPS)
def test_statistics(clips: Clips, mode: str) -> None:
    """The loss is a mean according to its aggregation, over its own count; everything else is per token, unweighted."""
    columns = _columns()
    clip_low, clip_high, dual = clips
    aggregation, shares, count = MODES[mode]
    total = low = high = far = kl1 = kl3 = ratios = largest = any_clip = 0.0
    for (new, old, advantage, weight), share in zip(_valid(*columns), shares, strict=True):
        ratio = math.exp(new) / math.exp(old)
        total += _plain(torch.tensor(new, dtype=torch.float64), old, advantage, clips).item() * weight * share
        is_low = advantage < 0 and ratio < 1 - clip_low
        is_high = advantage > 0 and ratio > 1 + clip_high
        is_far = dual is not None and advantage < 0 and ratio > dual
        low += is_low
        high += is_high
        far += is_far
        any_clip += is_low or is_high or is_far
        kl1 += old - new
        kl3 += ratio - 1 - math.log(ratio)
        ratios += ratio
        largest = max(largest, ratio)
    assert low > 0
    assert high > 0
    assert (far > 0) == (dual is not None)
    num_tokens = len(PLACES)
    means = {
        "actor/policy_loss": total / count,
        "actor/clip_fraction": any_clip / num_tokens,
        "actor/clip_low_fraction": low / num_tokens,
        "actor/clip_high_fraction": high / num_tokens,
        "actor/approx_kl_k1": kl1 / num_tokens,
        "actor/approx_kl_k3": kl3 / num_tokens,
        "actor/ratio_mean": ratios / num_tokens,
        "actor/ratio_max": largest,
    }
    if dual is not None:
        means["actor/dual_clip_fraction"] = far / num_tokens
    _check(_loss(aggregation, clips, columns, weighted=True).stats, means)


def test_gradient_at_the_old_policy_is_the_plain_policy_gradient() -> None:
    """At pi = pi_old, PPO's first step is REINFORCE: the gradient of -A·log pi by autograd of the unmasked formula."""
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


def test_absurd_ratios_stay_finite_and_dual_clip_bounds_them() -> None:
    old_BR = torch.tensor([[-200.0, -1.0, -1.0, -200.0]])
    log_probs_BR = torch.tensor([[-1.0, -200.0, -1.5, -1.0]], requires_grad=True)
    advantages_BR = torch.tensor([[0.0, 1.0, -1.0, -0.5]])
    mask_BR = torch.ones(1, 4, dtype=torch.bool)
    loss = policy_loss(log_probs_BR, old_BR, advantages_BR, mask_BR)
    assert loss.loss_sum.item() == pytest.approx(0.5 * math.exp(MAX_LOG_RATIO), rel=1e-6)
    assert loss.stats.maxima["actor/ratio_max"].item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-4)
    loss.loss_sum.backward()
    assert log_probs_BR.grad is not None
    assert torch.isfinite(log_probs_BR.grad).all()
    bounded = policy_loss(log_probs_BR, old_BR, advantages_BR, mask_BR, dual_clip=3.0)
    assert bounded.loss_sum.item() == pytest.approx(0.8 + 3.0 * 0.5 - math.exp(-MAX_LOG_RATIO), rel=1e-6)


def test_arguments_that_make_no_sense_are_refused() -> None:
    columns = _columns()
    with pytest.raises(AssertionError, match=r"dual_clip=1\.0 must be above 1"):
        policy_loss(*columns[:3], MASK_BR, dual_clip=1.0)
    with pytest.raises(AssertionError, match=r"weights_BR.*\(6, 1\)"):
        policy_loss(*columns[:3], MASK_BR, weights_BR=torch.ones(6, 1))
