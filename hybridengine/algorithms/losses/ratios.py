"""Ratios of two policies, and the gains that PPO, GSPO, CISPO and SAPO make of them; a loss is minus the sum of gains.

p is the trained policy, with gradient, and q the older one. Shape suffixes: B sequences, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.kl import MAX_LOG_RATIO
from hybridengine.algorithms.masking import zero_masked


def bounded_ratios(log_ratios: Tensor) -> Tensor:
    """Return the ratios, within e^±20, because inf·0 would be NaN."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratios(log_probs_BT: Tensor, old_log_probs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the geometric mean of p/q over each row's valid positions, at all positions of the row.

    At each position it has the gradient of that position's own log p, so that advantages may differ within a row. Equal
    advantages give the gradient of the mean itself. A row without a valid position has a ratio of 1.

    Shapes: all [B, T].
    Source: GSPO, arXiv 2507.18071, sections 4.1 and 4.3 (GSPO-token).
    """
    log_ratios_BT = zero_masked(log_probs_BT.detach() - old_log_probs_BT, mask_BT)
    means_B1 = log_ratios_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
    return bounded_ratios(means_B1) * (log_probs_BT - log_probs_BT.detach()).exp()


def clipped_gains(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return min(r·A, clip(r, low, high)·A). Source: PPO, arXiv 1707.06347, equation 7."""
    return torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)


def cispo_gains(ratios: Tensor, log_probs: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return clip(r, low, high)·log p·A, without gradient through the clipped ratio: no token loses its gradient.

    Source: CISPO, arXiv 2506.13585, equation 4.
    """
    return ratios.clamp(low, high).detach() * log_probs * advantages


def sapo_gains(
    ratios: Tensor, advantages: Tensor, positive_temperature: float, negative_temperature: float
) -> Tensor:
    """Return 4/tau·sigmoid(tau·(r - 1))·A, tau by the sign of A: the slope is A at r = 1 and falls on both sides.

    Source: SAPO, arXiv 2511.20347.
    """
    by_sign = advantages.new_tensor([negative_temperature, positive_temperature])
    temperatures = by_sign[(advantages > 0).long()]
    return 4.0 / temperatures * torch.sigmoid(temperatures * (ratios - 1.0)) * advantages
