"""Rollout correction: weights for tokens that were sampled by something other than the policy that is trained.

The engine that generates is not the trainer: other kernels, another precision, in asynchronous runs older weights. With
rho_t = pi_train_old/pi_rollout of a token (both known, neither has a gradient) there are

    token_tis           every token weighs min(rho_t, C)
    sequence_tis        every token of a row weighs min(prod rho_t, C)
    sequence_mis        every token of a row weighs prod rho_t; rows where that exceeds C are dropped
    geometric_filter    tokens weigh 1; rows are kept where low <= (prod rho_t)^(1/T) <= high, T their length

Token weights are biased but tame; the product over a row is unbiased, its variance grows with the length; the geometric
mean does not depend on the length. `weights_BR` goes into `policy_loss`. A dropped row weighs 0; to leave it out of
the loss's mean too, as sampling that rejects does, take `mask & keep_B[:, None]` as the mask.

Everything is computed from sums of logarithms, bounded before exp: no product overflows. A row without a valid token
has a product of 1: it is kept, and no statistic counts it. A NaN at a valid token stays NaN, it drops nothing.

Shape suffixes: B sequences, R response tokens, U units of one weight per row: R (tokens) or 1 (sequences).
Source: token: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025. Sequence
and geometric: J. Liu, Y. Li et al., "When speed kills stability: demystifying RL collapse from the training-inference
mismatch", 2025, https://richardli.xyz/rl-collapse, parts 2 and 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.kl import MAX_LOG_RATIO
from hybridengine.algorithms.masking import check_shapes, masked_max, masked_sum, zero_masked
from hybridengine.errors import ConfigError


@dataclass(frozen=True)
class RolloutWeights:
    """What a correction says about some rows; no gradient anywhere."""

    weights_BR: Tensor
    """Factor of each token's policy loss; 0 at masked entries and in dropped rows."""
    keep_B: Tensor
    """False for dropped rows."""
    log_ratios_BU: Tensor
    """log rho of each unit, before the cap, in float64."""
    unit_weights_BU: Tensor
    """Weight of each unit, in float64."""
    units_BU: Tensor
    """True where there is a unit: a valid token, or a row with one."""
    capped_BU: Tensor
    """True where the cap has lowered the weight."""


def token_tis(
    log_probs_BR: Tensor, rollout_log_probs_BR: Tensor, mask_BR: Tensor, cap: float
) -> RolloutWeights:
    """Truncated importance weights min(rho_t, cap). Shapes: all [B, R]."""
    log_ratios_BR = _token_log_ratios(log_probs_BR, rollout_log_probs_BR, mask_BR)
    return _truncated(log_ratios_BR, mask_BR, mask_BR, cap, log_probs_BR.dtype)


def sequence_tis(
    log_probs_BR: Tensor, rollout_log_probs_BR: Tensor, mask_BR: Tensor, cap: float
) -> RolloutWeights:
    """Truncated importance weights min(prod rho_t, cap). Shapes: all [B, R]."""
    sums_B1 = _token_log_ratios(log_probs_BR, rollout_log_probs_BR, mask_BR).sum(1, keepdim=True)
    return _truncated(sums_B1, mask_BR.any(1, keepdim=True), mask_BR, cap, log_probs_BR.dtype)


def sequence_mis(
    log_probs_BR: Tensor, rollout_log_probs_BR: Tensor, mask_BR: Tensor, cap: float
) -> RolloutWeights:
    """Masked importance weights: prod rho_t up to the cap, rows beyond it are dropped. Shapes: all [B, R]."""
    sums_B1 = _token_log_ratios(log_probs_BR, rollout_log_probs_BR, mask_BR).sum(1, keepdim=True)
    dropped_B1 = (sums_B1 > _log_bound(cap)) & mask_BR.any(1, keepdim=True)
    weights_B1 = torch.where(dropped_B1, -torch.inf, sums_B1).exp()
    return _filtered(sums_B1, weights_B1, dropped_B1, mask_BR, log_probs_BR.dtype)


def geometric_filter(
    log_probs_BR: Tensor, rollout_log_probs_BR: Tensor, mask_BR: Tensor, low: float, high: float
) -> RolloutWeights:
    """Weights 1 where low <= (prod rho_t)^(1/T) <= high; the other rows are dropped. Shapes: all [B, R]."""
    if not 0 <= low <= high:
        raise ConfigError(f"low={low} and high={high} of a correction must be 0 <= low <= high")
    sums_B1 = _token_log_ratios(log_probs_BR, rollout_log_probs_BR, mask_BR).sum(1, keepdim=True)
    means_B1 = sums_B1 / mask_BR.sum(1, keepdim=True).clamp(min=1)
    lowest = math.log(low) if low > 0 else -math.inf
    outside_B1 = (means_B1 < lowest) | (means_B1 > _log_bound(high))
    dropped_B1 = outside_B1 & mask_BR.any(1, keepdim=True)
    weights_B1 = torch.where(means_B1.isnan(), means_B1, (~dropped_B1).double())
    return _filtered(means_B1, weights_B1, dropped_B1, mask_BR, log_probs_BR.dtype)


CAPPED = {"token_tis": token_tis, "sequence_tis": sequence_tis, "sequence_mis": sequence_mis}
CORRECTIONS = (*CAPPED, "geometric_filter")
"""The corrections by the name that a run configuration gives; those of `CAPPED` have one bound, a cap."""


def rollout_weights(
    name: str,
    log_probs_BR: Tensor,
    rollout_log_probs_BR: Tensor,
    mask_BR: Tensor,
    high: float,
    low: float = 0.0,
) -> RolloutWeights:
    """Weights by the correction called `name`; `high` is its cap, `low` is read by geometric_filter only.

    Raises:
        ConfigError: there is no such correction, or its bounds make no sense.
    """
    if name not in CORRECTIONS:
        raise ConfigError(f"rollout_correction={name!r} is not known; choose one of {', '.join(CORRECTIONS)}")
    if name == "geometric_filter":
        return geometric_filter(log_probs_BR, rollout_log_probs_BR, mask_BR, low, high)
    return CAPPED[name](log_probs_BR, rollout_log_probs_BR, mask_BR, high)


@torch.no_grad()
def correction_metrics(weights: RolloutWeights, across: Across = ONE_PROCESS) -> dict[str, float]:
    """How far the rollout was from the training policy, over the units (tokens or sequences) of all ranks.

    correction/ratio_mean and ratio_max (rho before the cap, clamped to e^±20), weight_mean, capped_fraction,
    dropped_fraction, and effective_sample_share = (sum w)^2/(n·sum w^2): 1 where all weights are equal, 1/n where one
    of n rules; all are 0 where there is no unit. Collective.
    """
    units_BU, weights_BU = weights.units_BU, weights.unit_weights_BU
    ratios_BU = weights.log_ratios_BU.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    dropped_BU = ~weights.keep_B[:, None].expand_as(units_BU)
    columns = [
        torch.ones_like(ratios_BU),
        ratios_BU,
        weights_BU,
        weights_BU.square(),
        weights.capped_BU.double(),
        dropped_BU.double(),
    ]
    totals = across.sum(torch.stack([masked_sum(column_BU, units_BU) for column_BU in columns]))
    count, ratio, weight, square, capped, dropped = totals.tolist()
    largest = float(across.max(masked_max(ratios_BU, units_BU)))
    count = max(count, 1.0)
    return {
        "correction/ratio_mean": ratio / count,
        "correction/ratio_max": largest,
        "correction/weight_mean": weight / count,
        "correction/capped_fraction": capped / count,
        "correction/dropped_fraction": dropped / count,
        "correction/effective_sample_share": weight**2 / (count * square) if square else 0.0,
    }


def _token_log_ratios(log_probs_BR: Tensor, rollout_log_probs_BR: Tensor, mask_BR: Tensor) -> Tensor:
    check_shapes(log_probs_BR=log_probs_BR, rollout_log_probs_BR=rollout_log_probs_BR, mask_BR=mask_BR)
    return zero_masked(log_probs_BR.detach().double() - rollout_log_probs_BR.detach().double(), mask_BR)


def _log_bound(bound: float) -> float:
    if not bound > 0:
        raise ConfigError(f"the cap {bound} of a correction must be above 0; 2 to 10 is usual")
    return math.log(bound)


def _truncated(
    log_ratios_BU: Tensor, units_BU: Tensor, mask_BR: Tensor, cap: float, dtype: torch.dtype
) -> RolloutWeights:
    log_cap = _log_bound(cap)
    weights_BU = log_ratios_BU.clamp(max=log_cap).exp()
    return RolloutWeights(
        weights_BR=_for_tokens(weights_BU, mask_BR, dtype),
        keep_B=torch.ones(mask_BR.size(0), dtype=torch.bool, device=mask_BR.device),
        log_ratios_BU=log_ratios_BU,
        unit_weights_BU=weights_BU,
        units_BU=units_BU,
        capped_BU=log_ratios_BU > log_cap,
    )


def _filtered(
    log_ratios_B1: Tensor, weights_B1: Tensor, dropped_B1: Tensor, mask_BR: Tensor, dtype: torch.dtype
) -> RolloutWeights:
    return RolloutWeights(
        weights_BR=_for_tokens(weights_B1, mask_BR, dtype),
        keep_B=~dropped_B1.squeeze(1),
        log_ratios_BU=log_ratios_B1,
        unit_weights_BU=weights_B1,
        units_BU=mask_BR.any(1, keepdim=True),
        capped_BU=torch.zeros_like(dropped_B1),
    )


def _for_tokens(weights_BU: Tensor, mask_BR: Tensor, dtype: torch.dtype) -> Tensor:
    return zero_masked(weights_BU.expand(mask_BR.shape).to(dtype), mask_BR)
