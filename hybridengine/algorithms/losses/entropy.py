"""The entropy bonus: a loss that falls as the policy's distributions widen.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

from torch import Tensor

from hybridengine.algorithms.losses.aggregation import TokenLoss, TokenStats
from hybridengine.algorithms.masking import check_shapes, masked_sum


def entropy_bonus(entropies_BR: Tensor, mask_BR: Tensor, coefficient: float) -> TokenLoss:
    """Sum over valid tokens of -coefficient·H, H the entropy (nats) of a token's distribution.

    Shapes: both [B, R].
    Stats, as a mean per token once divided: actor/entropy (H itself, without the coefficient).
    Source: arXiv 1707.06347, equation 9.
    """
    check_shapes(entropies_BR=entropies_BR, mask_BR=mask_BR)
    entropy_sum = masked_sum(entropies_BR, mask_BR)
    return TokenLoss(-coefficient * entropy_sum, TokenStats({"actor/entropy": entropy_sum.detach().clone()}))
