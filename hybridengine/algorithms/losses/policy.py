"""PPO's clipped policy loss.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.kl import k1, k3
from hybridengine.algorithms.losses.aggregation import TokenLoss, TokenStats
from hybridengine.algorithms.masking import check_shapes, masked_max, masked_sum, zero_masked

MAX_LOG_RATIO = 20.0
"""log(pi/pi_old) is clamped to ±this: e^20 is far outside of any clip range, and inf·0 would be NaN."""


def policy_loss(
    log_probs_BR: Tensor,
    old_log_probs_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """Sum over valid tokens of -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) with r = pi/pi_old.

    Gradient flows through `log_probs_BR` only.

    Shapes: all [B, R].
    Stats, as means per token once divided: actor/policy_loss, actor/clip_low_fraction (A < 0 and r below the
        range), actor/clip_high_fraction (A > 0 and r above it), actor/clip_fraction (either: tokens without
        gradient), actor/approx_kl_k1 and actor/approx_kl_k3 (estimates of KL(pi_old || pi)),
        actor/ratio_mean; as a maximum actor/ratio_max.
    Source: arXiv 1707.06347, equation 7; two clip ranges as in DAPO, arXiv 2503.14476, section 3.1.
    """
    check_shapes(
        log_probs_BR=log_probs_BR,
        old_log_probs_BR=old_log_probs_BR,
        advantages_BR=advantages_BR,
        mask_BR=mask_BR,
    )
    old_log_probs_BR = zero_masked(old_log_probs_BR.detach(), mask_BR)
    advantages_BR = zero_masked(advantages_BR.detach(), mask_BR)
    log_probs_BR = zero_masked(log_probs_BR, mask_BR)
    ratio_BR = (log_probs_BR - old_log_probs_BR).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_ratio_BR = ratio_BR.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_sum = masked_sum(-torch.minimum(ratio_BR * advantages_BR, clipped_ratio_BR * advantages_BR), mask_BR)
    with torch.no_grad():
        clips_low_BR = (advantages_BR < 0) & (ratio_BR < 1.0 - clip_low)
        clips_high_BR = (advantages_BR > 0) & (ratio_BR > 1.0 + clip_high)
        per_token = {
            "actor/clip_fraction": (clips_low_BR | clips_high_BR).to(ratio_BR.dtype),
            "actor/clip_low_fraction": clips_low_BR.to(ratio_BR.dtype),
            "actor/clip_high_fraction": clips_high_BR.to(ratio_BR.dtype),
            "actor/approx_kl_k1": k1(old_log_probs_BR, log_probs_BR),
            "actor/approx_kl_k3": k3(old_log_probs_BR, log_probs_BR),
            "actor/ratio_mean": ratio_BR,
        }
        sums = {name: masked_sum(values_BR, mask_BR) for name, values_BR in per_token.items()}
        maxima = {"actor/ratio_max": masked_max(ratio_BR, mask_BR)}
    return TokenLoss(loss_sum, TokenStats({"actor/policy_loss": loss_sum.detach().clone(), **sums}, maxima))
