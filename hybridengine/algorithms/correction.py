"""Rollout correction: weights for tokens that were sampled by a policy other than the trained one.

The generation engine differs from the trainer in kernels and precision, and in asynchronous runs in the age of its
weights. With rho_t = pi_train_old/pi_rollout of a token (both known, neither has a gradient), the methods are:

    token_tis           every token weighs min(rho_t, C)
    icepop              tokens weigh rho_t where low <= rho_t <= high, and are dropped elsewhere
    sequence_tis        every token of a row weighs min(prod rho_t, C)
    sequence_mis        every token of a row weighs prod rho_t; rows where that exceeds C are dropped
    geometric_filter    tokens weigh 1; rows are kept where low <= (prod rho_t)^(1/T) <= high, T their length

A dropped row has weight 0; to exclude it from the loss's mean too, as rejection sampling does, use
`mask & keep_B[:, None]` as the mask. A dropped token has weight 0, thus no loss and no gradient, but counts in the
loss's mean, as in the paper. Logarithms are bounded before exp, so no product overflows. A row without a valid token has
a product of 1: it is kept, and excluded from all statistics. A NaN at a valid token stays NaN and drops nothing.

With the clipped loss on recomputed log-probs, token_tis is decoupled PPO with a cap: rho_t = pi_prox/pi_behav multiplies
min(u·A, clip(u)·A), where pi_prox is the policy before the update and u = pi/pi_prox. The recomputed log-probs are those
of pi_prox, and the engine's, of whatever version drew each token, those of pi_behav.

Shape suffixes: B sequences, R response tokens, U units with one weight each per row: R (tokens) or 1 (sequences).
Source: token: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025. Sequence
and geometric: J. Liu, Y. Li et al., "When speed kills stability: demystifying RL collapse from the training-inference
mismatch", 2025, https://richardli.xyz/rl-collapse, parts 2 and 3. IcePop: "Every step evolves", arXiv 2510.18855.
Decoupled PPO: arXiv 2505.24298, section 5.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.kl import MAX_LOG_RATIO
from hybridengine.algorithms.masking import check_shapes, masked_max, masked_sum, zero_masked
from hybridengine.config.algorithm import RANGE_METHODS, CorrectionName

TOKEN_METHODS = ("token_tis", "icepop")
"""Methods whose units are tokens."""
DROP_METHODS = ("icepop", "sequence_mis", "geometric_filter")
"""Methods that drop units above `high` instead of capping their weight."""


@dataclass(frozen=True)
class RolloutWeights:
    """Weights, and dropped rows or tokens, of a correction, without gradients."""

    weights_BR: Tensor
    """Factor of each token's policy loss; 0 at masked entries, in dropped rows and for dropped tokens."""
    keep_B: Tensor
    """False for dropped rows; True for rows that have lost tokens only."""
    log_ratios_BU: Tensor
    """log rho of each unit, before the cap, in float64."""
    unit_weights_BU: Tensor
    """Weight of each unit, in float64."""
    units_BU: Tensor
    """True for units that exist: a valid token, or a row with one."""
    capped_BU: Tensor
    """True where the weight was capped."""
    dropped_BU: Tensor
    """True for dropped units."""


@torch.no_grad()
def rollout_weights(
    name: CorrectionName,
    log_probs_BR: Tensor,
    rollout_log_probs_BR: Tensor,
    mask_BR: Tensor,
    high: float,
    low: float = 0.0,
) -> RolloutWeights:
    """Return the weights computed by the correction `name`.

    Shapes: all [B, R].
    Args:
        high: cap of the weights, above 0; the largest weight for icepop, the largest mean for geometric_filter.
        low: smallest weight for icepop, smallest mean for geometric_filter, at least 0; ignored by the other methods.
    """
    assert name in get_args(CorrectionName), f"no rollout correction is called {name!r}"
    check_shapes(log_probs_BR=log_probs_BR, rollout_log_probs_BR=rollout_log_probs_BR, mask_BR=mask_BR)
    logs_BU = zero_masked(log_probs_BR.double() - rollout_log_probs_BR.double(), mask_BR)
    units_BU = mask_BR
    if name not in TOKEN_METHODS:
        logs_BU, units_BU = logs_BU.sum(1, keepdim=True), mask_BR.any(1, keepdim=True)
    if name == "geometric_filter":
        logs_BU = logs_BU / mask_BR.sum(1, keepdim=True).clamp(min=1)
    beyond_BU = (logs_BU > math.log(high)) & units_BU
    dropped_BU = beyond_BU if name in DROP_METHODS else torch.zeros_like(beyond_BU)
    if name in RANGE_METHODS:
        dropped_BU = dropped_BU | ((logs_BU < (math.log(low) if low else -math.inf)) & units_BU)
    weights_BU = logs_BU.clamp(max=math.log(high)).exp()
    if name == "geometric_filter":
        weights_BU = torch.where(logs_BU.isnan(), logs_BU, 1.0)
    weights_BU = torch.where(dropped_BU, 0.0, weights_BU)
    return RolloutWeights(
        weights_BR=zero_masked(weights_BU.expand(mask_BR.shape).to(log_probs_BR.dtype), mask_BR),
        keep_B=mask_BR.new_ones(len(mask_BR)) if name in TOKEN_METHODS else ~dropped_BU.any(1),
        log_ratios_BU=logs_BU,
        unit_weights_BU=weights_BU,
        units_BU=units_BU,
        capped_BU=beyond_BU & ~dropped_BU,
        dropped_BU=dropped_BU,
    )


@torch.no_grad()
def correction_metrics(weights: RolloutWeights, across: Across = ONE_PROCESS) -> dict[str, float]:
    """Return metrics of the distance between rollout and training policy, over the units of all ranks.

    correction/ratio_mean and ratio_max (rho before the cap, clamped to e^±20), weight_mean, capped_fraction,
    dropped_fraction, and effective_sample_share = (sum w)^2/(n·sum w^2): 1 if all weights are equal, 1/n if one of n
    dominates; all are 0 if there are no units. Units are tokens or sequences. Collective.
    """
    units_BU, weights_BU = weights.units_BU, weights.unit_weights_BU
    ratios_BU = weights.log_ratios_BU.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    columns = [
        torch.ones_like(ratios_BU),
        ratios_BU,
        weights_BU,
        weights_BU.square(),
        weights.capped_BU.double(),
        weights.dropped_BU.double(),
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
