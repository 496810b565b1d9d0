"""Per-token estimators of KL(pi || pi_ref) from tokens sampled by pi.

With D = log pi(token) - log pi_ref(token):

    k1 = D                   unbiased, high variance, can be negative
    k2 = D^2 / 2             biased, low variance, never negative
    k3 = exp(-D) + D - 1     unbiased, low variance, never negative
    abs = |D|                biased, never negative: bounds the distance, whichever policy is the likelier

These properties hold for the values, as in a reward. As a loss, their gradients matter: see losses.policy.kl_loss.

Source: J. Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html.
All functions are element-wise over tensors of equal shape, usually response-aligned [B, R].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Largest log-ratio, beyond which ratios are clamped: far outside any clip range, with squares that fit float32."""


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return exp(-D) + D - 1, continued along its tangent where pi_ref/pi exceeds e^20, so that nothing overflows."""
    log_ratio = ref_log_probs - log_probs
    followed = log_ratio.clamp(max=MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(-D) - 1 loses at small D; the middle term is 0 up to MAX_LOG_RATIO.
    return torch.expm1(followed) + followed.exp() * (log_ratio - followed) - log_ratio


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return (log_probs - ref_log_probs).abs()


def straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    """Return `value` with the gradient of another tensor."""
    return value.detach() + (gradient - gradient.detach())


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
"""Name in a run configuration -> estimator."""
