"""The entropy bonus: a loss that falls as the policy's distributions widen.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

from torch import Tensor

from hybridengine.algorithms.losses.aggregation import PER_TOKEN, Aggregation, LossStats, SummedLoss
from hybridengine.algorithms.masking import check_shapes, masked_sum


def entropy_bonus(
    entropies_BR: Tensor, mask_BR: Tensor, coefficient: float, aggregation: Aggregation = PER_TOKEN
) -> SummedLoss:
    """-coefficient·H of every valid token, summed as `aggregation` says; H is the entropy (nats) of a distribution.

    Shapes: both [B, R].
    Stats, as a mean per token once divided: actor/entropy (H itself, without the coefficient).
    Source: arXiv 1707.06347, equation 9.
    """
    check_shapes(entropies_BR=entropies_BR, mask_BR=mask_BR)
    loss_sum = -coefficient * aggregation.loss_sum(entropies_BR, mask_BR)
    return SummedLoss(
        loss_sum, LossStats({"actor/entropy": masked_sum(entropies_BR.detach(), mask_BR).clone()})
    )
