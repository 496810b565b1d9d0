"""Advantages of rewards and costs together: PPO-Lagrangian as in Safe-RLHF.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.masking import check_shapes, zero_masked


@torch.no_grad()
def safe_advantages(
    reward_advantages_BR: Tensor, cost_advantages_BR: Tensor, mask_BR: Tensor, multiplier: float
) -> Tensor:
    """(A_r - lam·A_c)/(1 + lam): the division keeps the step size while the multiplier lam moves.

    Shapes: all [B, R] -> [B, R], 0 at masked entries. Each has its own critic and GAE; whiten both or none.
    Source: arXiv 2310.12773, equation 30 (the policy's update divided by 1 + lam).
    """
    check_shapes(
        reward_advantages_BR=reward_advantages_BR, cost_advantages_BR=cost_advantages_BR, mask_BR=mask_BR
    )
    return zero_masked((reward_advantages_BR - multiplier * cost_advantages_BR) / (1.0 + multiplier), mask_BR)
