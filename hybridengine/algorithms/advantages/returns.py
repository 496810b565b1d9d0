"""Returns as advantages: what a token's response still earned, without a critic. REINFORCE++ and ReMax.

Dropped rows are rows without a valid token: `mask & keep[:, None]`.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.advantages.gae import gae
from hybridengine.algorithms.masking import over_tokens, whiten


@torch.no_grad()
def discounted_returns(rewards_BR: Tensor, mask_BR: Tensor, gamma: float) -> Tensor:
    """G_j = r_j + gamma·G_{j+1} of every response token; j + 1 is the next valid token, and G = 0 after the last.

    Shapes: both [B, R] -> [B, R], 0 at masked entries.
    """
    # GAE with no values and lambda = 1 is this sum.
    advantages_BR, _ = gae(rewards_BR, torch.zeros_like(rewards_BR), mask_BR, gamma, lam=1.0)
    return advantages_BR


def reinforce_plus_plus(
    rewards_BR: Tensor, mask_BR: Tensor, gamma: float = 1.0, across: Across = ONE_PROCESS
) -> Tensor:
    """Discounted returns, with mean 0 and variance 1 over the valid tokens of the whole batch.

    The rewards carry the KL penalty (`token_rewards`). Shapes: both [B, R] -> [B, R], 0 at masked entries.
    Guarantees: returns that are all equal (one valid token, say) give 0.
    Source: arXiv 2501.03262, global advantage normalisation with one response per prompt.
    """
    return whiten(discounted_returns(rewards_BR, mask_BR, gamma), mask_BR, across=across)


@torch.no_grad()
def remax(rewards_BR: Tensor, mask_BR: Tensor, baseline_scores_B: Tensor) -> Tensor:
    """Sum of the rewards from each token on, less the reward of the greedy response to the same prompt.

    Shapes: rewards_BR and mask_BR [B, R], baseline_scores_B [B] -> [B, R], 0 at masked entries.
    Guarantees: the baseline of a row without a valid token is not read; drop rows whose baseline has failed.
    Source: arXiv 2310.10505, algorithm 1.
    """
    baseline_BR = over_tokens(baseline_scores_B.to(rewards_BR.dtype), mask_BR)
    return discounted_returns(rewards_BR, mask_BR, gamma=1.0) - baseline_BR
