"""Parts that the policy losses share: their inputs without masked entries, their sum and its statistics.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridengine.algorithms.kl import k1, k3
from hybridengine.algorithms.losses.aggregation import Aggregation, LossStats, SummedLoss
from hybridengine.algorithms.masking import check_shapes, masked_max, masked_sum, zero_masked


def cleaned(
    log_probs_BR: Tensor, old_log_probs_BR: Tensor, advantages_BR: Tensor, mask_BR: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, old log-probs and advantages with zeros at masked entries; only the first have a gradient."""
    check_shapes(log_probs_BR=log_probs_BR, old_log_probs_BR=old_log_probs_BR)
    check_shapes(advantages_BR=advantages_BR, log_probs_BR=log_probs_BR, mask_BR=mask_BR)
    old_BR, advantages_BR = (
        zero_masked(c_BR.detach(), mask_BR) for c_BR in (old_log_probs_BR, advantages_BR)
    )
    return zero_masked(log_probs_BR, mask_BR), old_BR, advantages_BR


def summed_loss(
    gains_BR: Tensor,
    ratios_BR: Tensor,
    log_probs_BR: Tensor,
    old_log_probs_BR: Tensor,
    mask_BR: Tensor,
    weights_BR: Tensor | None,
    aggregation: Aggregation,
    clips: Mapping[str, Tensor] | None = None,
) -> SummedLoss:
    """Return minus the weighted gains of all valid tokens, summed by `aggregation`.

    Stats: the loss by its own count; as means per token KL(pi_old || pi) by two estimators, the ratios' mean, the
    fractions `clips` (metric -> bool [B, R]) and that of any of them; the largest ratio.
    """
    if weights_BR is not None:
        check_shapes(weights_BR=weights_BR, mask_BR=mask_BR)
        gains_BR = gains_BR * weights_BR.detach()
    loss_sum = aggregation.loss_sum(-gains_BR, mask_BR)
    clipped = dict(clips or {})
    if clipped:
        clipped["actor/clip_fraction"] = torch.stack(list(clipped.values())).any(0)
    with torch.no_grad():
        per_token = {name: clipped_BR.to(ratios_BR.dtype) for name, clipped_BR in clipped.items()} | {
            "actor/approx_kl_k1": k1(old_log_probs_BR, log_probs_BR),
            "actor/approx_kl_k3": k3(old_log_probs_BR, log_probs_BR),
            "actor/ratio_mean": ratios_BR,
        }
        sums = {name: masked_sum(values_BR, mask_BR) for name, values_BR in per_token.items()}
        maxima = {"actor/ratio_max": masked_max(ratios_BR, mask_BR)}
    mean = "actor/policy_loss"
    stats = LossStats({mean: loss_sum.detach().clone(), **sums}, maxima, {mean: aggregation.count(mask_BR)})
    return SummedLoss(loss_sum, stats)
