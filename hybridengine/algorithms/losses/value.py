"""PPO's clipped value loss. Shape suffixes: B sequences, R response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.losses.aggregation import LossStats, SummedLoss
from hybridengine.algorithms.masking import check_shapes, masked_sum, zero_masked


def value_loss(
    values_BR: Tensor,
    old_values_BR: Tensor,
    returns_BR: Tensor,
    mask_BR: Tensor,
    clip_value: float | None = 0.2,
) -> SummedLoss:
    """Return the sum over valid tokens of 1/2·max((V - R)^2, (V_clip - R)^2), V_clip = clip(V, V_old ± clip_value).

    Gradient flows through `values_BR` only. With `clip_value=None` the loss is 1/2·(V - R)^2.

    Shapes: all [B, R].
    Stats, as means per token once divided: critic/value_loss, critic/clip_fraction (tokens whose clipped error is
        larger, which have no gradient), critic/squared_error (V - R)^2, critic/value_mean, critic/return_mean.
    Source: PPO's reference implementation, OpenAI baselines, ppo2.
    """
    check_shapes(values_BR=values_BR, old_values_BR=old_values_BR, returns_BR=returns_BR, mask_BR=mask_BR)
    values_BR = zero_masked(values_BR, mask_BR)
    old_values_BR = zero_masked(old_values_BR.detach(), mask_BR)
    returns_BR = zero_masked(returns_BR.detach(), mask_BR)
    squared_error_BR = (values_BR - returns_BR).square()
    if clip_value is None:
        clipped_error_BR = squared_error_BR
    else:
        # Not V_old plus a clamped difference: inside the range the result must equal V exactly.
        clipped_BR = values_BR.clamp(old_values_BR - clip_value, old_values_BR + clip_value)
        clipped_error_BR = (clipped_BR - returns_BR).square()
    loss_sum = masked_sum(0.5 * torch.maximum(squared_error_BR, clipped_error_BR), mask_BR)
    with torch.no_grad():
        per_token = {
            "critic/clip_fraction": (clipped_error_BR > squared_error_BR).to(values_BR.dtype),
            "critic/squared_error": squared_error_BR,
            "critic/value_mean": values_BR,
            "critic/return_mean": returns_BR,
        }
        sums = {name: masked_sum(values, mask_BR) for name, values in per_token.items()}
    return SummedLoss(loss_sum, LossStats({"critic/value_loss": loss_sum.detach().clone(), **sums}))
