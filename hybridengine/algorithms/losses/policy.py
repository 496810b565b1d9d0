"""Terms of the actor's loss: PPO's clipped policy loss with later variants, GSPO and CISPO, KL divergence, entropy bonus.

Other policy losses that `algorithm.loss` chooses are in unclipped.py and covariance.py.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridengine.algorithms.kl import KL_ESTIMATORS, k2, straight_through
from hybridengine.algorithms.losses.aggregation import PER_TOKEN, Aggregation, LossStats, SummedLoss
from hybridengine.algorithms.losses.parts import cleaned, summed_loss
from hybridengine.algorithms.losses.ratios import (
    bounded_ratios,
    cispo_gains,
    clipped_gains,
    sequence_ratios,
)
from hybridengine.algorithms.masking import check_shapes, masked_sum, zero_masked
from hybridengine.config.algorithm import Algorithm
from hybridengine.config.role_sections import ActorSection


def policy_loss(
    log_probs_BR: Tensor,
    old_log_probs_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    *,
    dual_clip: float | None = None,
    per_sequence: bool = False,
    weights_BR: Tensor | None = None,
    aggregation: Aggregation = PER_TOKEN,
) -> SummedLoss:
    """Return -w·min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) of all valid tokens, summed by `aggregation`.

    r = pi/pi_old, clamped to e^±20, because inf·0 would be NaN. With `dual_clip` c > 1 the minimum is bounded below:
    where A < 0 it is max(min(...), c·A), so that a token with a very large r does not dominate the batch. With
    `per_sequence` r is the geometric mean over the row's valid tokens (GSPO). The weights w (1 by default) correct for
    sampling from a policy other than pi_old: see correction.py. Gradient flows through `log_probs_BR` only.

    Shapes: all [B, R].
    Stats: actor/policy_loss, the mean selected by `aggregation`; as means per token, without weights:
        actor/clip_low_fraction (A < 0 and r below the range), actor/clip_high_fraction (A > 0 and r above it),
        actor/dual_clip_fraction (A < 0 and r > c; only with `dual_clip`), actor/clip_fraction (any of these: tokens
        without gradient), actor/approx_kl_k1 and actor/approx_kl_k3 (estimates of KL(pi_old || pi)),
        actor/ratio_mean; as a maximum actor/ratio_max.
    Source: arXiv 1707.06347, equation 7; two clip ranges as in DAPO, arXiv 2503.14476, section 3.1; dual clip:
        arXiv 1912.09729, equation 5; weights outside of the minimum: arXiv 2505.24298, section 5.2; ratios of whole
        sequences: arXiv 2507.18071, section 4.
    """
    assert dual_clip is None or dual_clip > 1, f"dual_clip={dual_clip} must be above 1, or None"
    new_BR, old_BR, advantages_BR = cleaned(log_probs_BR, old_log_probs_BR, advantages_BR, mask_BR)
    ratios_BR = sequence_ratios(new_BR, old_BR, mask_BR) if per_sequence else bounded_ratios(new_BR - old_BR)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    gains_BR = clipped_gains(ratios_BR, advantages_BR, low, high)
    clips = {
        "actor/clip_low_fraction": (advantages_BR < 0) & (ratios_BR < low),
        "actor/clip_high_fraction": (advantages_BR > 0) & (ratios_BR > high),
    }
    if dual_clip is not None:
        clips["actor/dual_clip_fraction"] = (advantages_BR < 0) & (ratios_BR > dual_clip)
        gains_BR = torch.where(clips["actor/dual_clip_fraction"], dual_clip * advantages_BR, gains_BR)
    return summed_loss(gains_BR, ratios_BR, new_BR, old_BR, mask_BR, weights_BR, aggregation, clips)


def clipped_weight_loss(
    log_probs_BR: Tensor,
    old_log_probs_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
    *,
    weights_BR: Tensor | None = None,
    aggregation: Aggregation = PER_TOKEN,
) -> SummedLoss:
    """Return -w·clip(r, 1 - clip_low, 1 + clip_high)·A·log pi of all valid tokens, summed by `aggregation` (CISPO).

    No gradient flows through the clipped ratio r = pi/pi_old, so that all tokens keep a gradient, bounded in its weight.
    A `clip_low` of 1 bounds r from above only.

    Shapes: all [B, R].
    Stats: as `policy_loss`, but with all tokens in the clip fractions whose r is below (clip_low_fraction) or above the
        range (clip_high_fraction), whatever their advantage.
    Source: CISPO, arXiv 2506.13585, equation 4.
    """
    new_BR, old_BR, advantages_BR = cleaned(log_probs_BR, old_log_probs_BR, advantages_BR, mask_BR)
    ratios_BR = bounded_ratios(new_BR - old_BR)
    low, high = 1.0 - clip_low, 1.0 + clip_high
    gains_BR = cispo_gains(ratios_BR, new_BR, advantages_BR, low, high)
    clips = {
        "actor/clip_low_fraction": ratios_BR < low,
        "actor/clip_high_fraction": ratios_BR > high,
    }
    return summed_loss(gains_BR, ratios_BR, new_BR, old_BR, mask_BR, weights_BR, aggregation, clips)


def kl_loss(
    log_probs_BR: Tensor,
    ref_log_probs_BR: Tensor,
    mask_BR: Tensor,
    coefficient: float,
    estimator: str = "k3",
    aggregation: Aggregation = PER_TOKEN,
) -> SummedLoss:
    """Return coefficient·KL of all valid tokens by an estimator of kl.py, summed by `aggregation`.

    Gradient flows through `log_probs_BR` only. Its expectation, over tokens sampled by pi itself:

        k1    0: the value is unbiased, but as a loss it has no direction and only adds noise
        k2    grad KL(pi || pi_ref), though the value is biased
        k3    grad KL(pi_ref || pi), the other direction; the two agree to first order near pi = pi_ref. GRPO's choice
        abs   the gradient of the total variation distance of pi and pi_ref, doubled
        k1+, k3+, abs+: straight through, that is the value of k1, k3 or abs with the gradient of k2

    Shapes: all [B, R].
    Stats, as a mean per token once divided: actor/kl_loss (the estimator's value, without the coefficient).
    Source: arXiv 2402.03300, equations 3 and 4; gradients: arXiv 2510.01555.
    """
    check_shapes(log_probs_BR=log_probs_BR, ref_log_probs_BR=ref_log_probs_BR, mask_BR=mask_BR)
    both_BR = zero_masked(log_probs_BR, mask_BR), zero_masked(ref_log_probs_BR.detach(), mask_BR)
    kl_BR = KL_ESTIMATORS[estimator.removesuffix("+")](*both_BR)
    if estimator.endswith("+"):
        kl_BR = straight_through(kl_BR, k2(*both_BR))
    loss_sum = coefficient * aggregation.loss_sum(kl_BR, mask_BR)
    return SummedLoss(loss_sum, LossStats({"actor/kl_loss": masked_sum(kl_BR.detach(), mask_BR)}))


def entropy_bonus(
    entropies_BR: Tensor, mask_BR: Tensor, coefficient: float, aggregation: Aggregation = PER_TOKEN
) -> SummedLoss:
    """Return -coefficient·H of all valid tokens, summed by `aggregation`; H is a distribution's entropy (nats).

    Shapes: both [B, R].
    Stats, as a mean per token once divided: actor/entropy (H itself, without the coefficient).
    Source: arXiv 1707.06347, equation 9.
    """
    check_shapes(entropies_BR=entropies_BR, mask_BR=mask_BR)
    loss_sum = -coefficient * aggregation.loss_sum(entropies_BR, mask_BR)
    return SummedLoss(
        loss_sum, LossStats({"actor/entropy": masked_sum(entropies_BR.detach(), mask_BR).clone()})
    )


def clipped_loss(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    algorithm: Algorithm,
    actor: ActorSection,
    aggregation: Aggregation,
) -> SummedLoss:
    """Return `policy_loss` of the columns of a micro-batch, with the clip ranges of the actor's section.

    The columns are `mask`, `log_probs` (of the old policy) and `advantages`, all [B, R]; optionally `weights` of the
    rollout correction and `ref_log_probs`.
    """
    return _clipped_loss(log_probs_BR, columns, actor, aggregation, per_sequence=False)


def gspo_loss(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    algorithm: Algorithm,
    actor: ActorSection,
    aggregation: Aggregation,
) -> SummedLoss:
    """Return GSPO's loss, which is `clipped_loss` with one ratio per sequence: the geometric mean over its valid tokens.

    As published, `actor.loss_aggregation` is sequence, and the ranges are far smaller than PPO's: `actor.clip_low` 3e-4
    and `clip_high` 4e-4.

    Source: arXiv 2507.18071, sections 4.1 and 5.1.
    """
    return _clipped_loss(log_probs_BR, columns, actor, aggregation, per_sequence=True)


def _clipped_loss(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    actor: ActorSection,
    aggregation: Aggregation,
    *,
    per_sequence: bool,
) -> SummedLoss:
    return policy_loss(
        log_probs_BR,
        columns["log_probs"],
        columns["advantages"],
        columns["mask"],
        actor.clip_low,
        actor.clip_high,
        dual_clip=actor.dual_clip,
        per_sequence=per_sequence,
        weights_BR=columns.get("weights"),
        aggregation=aggregation,
    )


def cispo_loss(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    algorithm: Algorithm,
    actor: ActorSection,
    aggregation: Aggregation,
) -> SummedLoss:
    """Return CISPO's loss (`clipped_weight_loss`) of the columns of `clipped_loss`, with the actor's clip ranges.

    As published, there is no lower bound: `actor.clip_low` 1. `actor.dual_clip` is not read.
    """
    return clipped_weight_loss(
        log_probs_BR,
        columns["log_probs"],
        columns["advantages"],
        columns["mask"],
        actor.clip_low,
        actor.clip_high,
        weights_BR=columns.get("weights"),
        aggregation=aggregation,
    )
