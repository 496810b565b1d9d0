"""The reward of each token: the sequence's score at its last token, less the price of leaving the reference.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.masking import check_shapes, zero_masked


@torch.no_grad()
def token_rewards(scores_B: Tensor, kl_BR: Tensor, mask_BR: Tensor, kl_coefficient: float) -> Tensor:
    """Rewards r_j = score·[j is the last valid token] - kl_coefficient·kl_j.

    With `kl_BR` = k1(old log-probs, reference log-probs) this is the reward of RLHF's PPO; the coefficient is
    fixed.

    Shapes: scores_B [B], kl_BR and mask_BR [B, R] -> [B, R], 0 at masked entries.
    Guarantees: an empty response has no token that could carry its score, so its row is all zeros.
    Source: InstructGPT, arXiv 2203.02155, equation 2; per token as in arXiv 1909.08593, section 2.
    """
    check_shapes(kl_BR=kl_BR, mask_BR=mask_BR)
    assert scores_B.shape == mask_BR.shape[:1], (
        f"scores_B {tuple(scores_B.shape)} must be one score for each row of mask_BR {tuple(mask_BR.shape)}"
    )
    valid_from_here_BR = mask_BR.flip(1).cumsum(1).flip(1)
    is_last_BR = mask_BR & (valid_from_here_BR == 1)
    return zero_masked(-kl_coefficient * kl_BR, mask_BR) + zero_masked(
        scores_B[:, None].to(kl_BR.dtype).expand_as(kl_BR), is_last_BR
    )
