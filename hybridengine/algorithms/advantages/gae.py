"""Generalised advantage estimation over the response tokens.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.masking import check_shapes, zero_masked


@torch.no_grad()
def gae(
    rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages A and returns A + V of every response token.

        delta_j = r_j + gamma·V_{j+1} - V_j
        A_j     = delta_j + gamma·lam·A_{j+1}

    j + 1 is the next valid token. After the last one the episode is over: V = A = 0, also where the response
    was cut off by `max_response_tokens` before its EOS. The advantages are not whitened: see masking.whiten.

    Shapes: all [B, R], response-aligned (values_BR[:, j] is the value of the state before token j)
        -> two of [B, R], 0 at masked entries, without gradient.
    Source: arXiv 1506.02438, equations 11, 12 and 16.
    """
    check_shapes(rewards_BR=rewards_BR, values_BR=values_BR, mask_BR=mask_BR)
    rewards_BR = zero_masked(rewards_BR, mask_BR)
    values_BR = zero_masked(values_BR, mask_BR)
    advantages_BR = torch.zeros_like(values_BR)
    next_value_B = values_BR.new_zeros(values_BR.shape[0])
    next_advantage_B = torch.zeros_like(next_value_B)
    for j in reversed(range(values_BR.shape[1])):
        valid_B = mask_BR[:, j]
        delta_B = rewards_BR[:, j] + gamma * next_value_B - values_BR[:, j]
        next_advantage_B = torch.where(valid_B, delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(valid_B, values_BR[:, j], next_value_B)
        advantages_BR[:, j] = next_advantage_B
    advantages_BR = zero_masked(advantages_BR, mask_BR)
    return advantages_BR, advantages_BR + values_BR
