"""Per-token rewards, and advantages computed from them; those of groups of responses are in group_advantages.py.

A dropped row is a row without a valid token: `mask & keep[:, None]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.masking import check_shapes, over_tokens, whiten, zero_masked


@torch.no_grad()
def token_rewards(scores_B: Tensor, kl_BR: Tensor, mask_BR: Tensor, kl_coefficient: float) -> Tensor:
    """Return rewards r_j = score·[j is the last valid token] - kl_coefficient·kl_j.

    Shapes: scores_B [B], kl_BR and mask_BR [B, R] -> [B, R], 0 at masked entries and for empty responses.
    Source: InstructGPT, arXiv 2203.02155, equation 2; per token as in arXiv 1909.08593, section 2.
    """
    check_shapes(kl_BR=kl_BR, mask_BR=mask_BR)
    is_last_BR = mask_BR & (mask_BR.flip(1).cumsum(1).flip(1) == 1)
    return zero_masked(-kl_coefficient * kl_BR, mask_BR) + over_tokens(scores_B.to(kl_BR.dtype), is_last_BR)


@torch.no_grad()
def gae(
    rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return advantages A and returns A + V of every response token.

        delta_j = r_j + gamma·V_{j+1} - V_j
        A_j     = delta_j + gamma·lam·A_{j+1}

    j + 1 is the next valid token. After the last one the episode has ended: V = A = 0, also where the response was
    truncated by `max_response_tokens` before its EOS. The advantages are not whitened: see masking.whiten. `lam` is one
    number or one for each row, [B].

    Shapes: all other [B, R], response-aligned (values_BR[:, j] is the value of the state before token j)
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


@torch.no_grad()
def length_adaptive_lambdas(mask_BR: Tensor, alpha: float) -> Tensor:
    """Return lambda = 1 - 1/(alpha·l) of each row's GAE, 0 if that is negative; l is its number of valid tokens.

    The weights of its TD errors, lambda^0 to lambda^l, then add up to about alpha·l: a fixed share of any row.

    Shapes: [B, R] -> [B], float64.
    Source: VAPO, arXiv 2504.05118, section 4.2 (length-adaptive GAE).
    """
    return (1.0 - 1.0 / (alpha * mask_BR.sum(1).clamp(min=1).double())).clamp(min=0.0)


@torch.no_grad()
def discounted_returns(rewards_BR: Tensor, mask_BR: Tensor, gamma: float) -> Tensor:
    """Return G_j = r_j + gamma·G_{j+1} of every response token; j + 1 is the next valid token, G = 0 after the last.

    Shapes: both [B, R] -> [B, R], 0 at masked entries.
    """
    # GAE without values and with lambda = 1 is this sum.
    advantages_BR, _ = gae(rewards_BR, torch.zeros_like(rewards_BR), mask_BR, gamma, lam=1.0)
    return advantages_BR


def reinforce_plus_plus(
    rewards_BR: Tensor,
    mask_BR: Tensor,
    gamma: float = 1.0,
    across: Across = ONE_PROCESS,
    trained_BR: Tensor | None = None,
) -> Tensor:
    """Return discounted returns, scaled to mean 0 and variance 1 over the trained tokens of the whole batch.

    The rewards carry the KL penalty (`token_rewards`). Shapes: all [B, R] -> [B, R], 0 at tokens that are not trained.
    By default all valid tokens are trained.
    Guarantees: returns that are all equal (such as a single valid token) give 0.
    Source: arXiv 2501.03262, global advantage normalisation with one response per prompt.
    """
    trained_BR = mask_BR if trained_BR is None else trained_BR
    return whiten(discounted_returns(rewards_BR, mask_BR, gamma), trained_BR, across=across)


@torch.no_grad()
def remax(rewards_BR: Tensor, mask_BR: Tensor, baseline_scores_B: Tensor) -> Tensor:
    """Return the sum of rewards from each token on, minus the reward of the greedy response to the same prompt.

    Shapes: rewards_BR and mask_BR [B, R], baseline_scores_B [B] -> [B, R], 0 at masked entries.
    Source: arXiv 2310.10505, algorithm 1.
    """
    baseline_BR = over_tokens(baseline_scores_B.to(rewards_BR.dtype), mask_BR)
    return discounted_returns(rewards_BR, mask_BR, gamma=1.0) - baseline_BR


@torch.no_grad()
def safe_advantages(
    reward_advantages_BR: Tensor, cost_advantages_BR: Tensor, mask_BR: Tensor, multiplier: float
) -> Tensor:
    """Return (A_r - lam·A_c)/(1 + lam): the division keeps the step size stable as the multiplier lam changes.

    Shapes: all [B, R] -> [B, R], 0 at masked entries. Each has its own critic and GAE; whiten both or none.
    Source: Safe-RLHF, arXiv 2310.12773, equation 30 (the policy's update divided by 1 + lam).
    """
    check_shapes(
        reward_advantages_BR=reward_advantages_BR, cost_advantages_BR=cost_advantages_BR, mask_BR=mask_BR
    )
    return zero_masked((reward_advantages_BR - multiplier * cost_advantages_BR) / (1.0 + multiplier), mask_BR)
