"""Per-token rewards, and advantages computed from them.

Rows of one prompt may be anywhere: on several ranks, in any order. The estimators over groups therefore take the number
of each row's group (with G samples per prompt: row number // G), and all ranks take part in every call, even without
rows. A group of one has no baseline and gives 0; a group without variance gives exactly 0, not a rounding error divided
by epsilon. Rows whose `keep_B` is False are excluded from all means and give 0; their scores may be NaN. In functions
without `keep_B`, a dropped row is a row without a valid token: `mask & keep[:, None]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.masking import check_rows, check_shapes, over_tokens, whiten, zero_masked

GROUP_EPSILON = 1e-6
"""Constant added to a group's standard deviation."""


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
    rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages A and returns A + V of every response token.

        delta_j = r_j + gamma·V_{j+1} - V_j
        A_j     = delta_j + gamma·lam·A_{j+1}

    j + 1 is the next valid token. After the last one the episode has ended: V = A = 0, also where the response was
    truncated by `max_response_tokens` before its EOS. The advantages are not whitened: see masking.whiten.

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
def grpo(
    scores_B: Tensor,
    groups_B: Tensor,
    keep_B: Tensor | None = None,
    across: Across = ONE_PROCESS,
    normalize_std: bool = True,
) -> Tensor:
    """Return (r - mean)/(std + 1e-6) over the rows of each group, where std divides by n - 1.

    Dr.GRPO is `normalize_std=False`, r - mean, with the loss aggregation "sequence_sum".

    Shapes: scores_B [B], groups_B [B] integers from 0, keep_B bool [B] -> [B].
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; without the division: arXiv 2503.20783, section 3.
    """
    groups = _Groups(groups_B, keep_B, across)
    centred_B = groups.centred(scores_B)
    if normalize_std:
        variance_B = groups.sum(centred_B.square()) / (groups.sizes_B - 1).clamp(min=1)
        centred_B = centred_B / (variance_B.sqrt() + GROUP_EPSILON)
    return centred_B.to(scores_B.dtype)


def has_equal_scores(scores: Tensor, dropped: Tensor) -> bool:
    """Return whether the rows of a group have no advantages: all scores, but of rows that are dropped, are the same.

    Shapes: scores [n], dropped bool [n].
    Source: DAPO, arXiv 2503.14476, section 3.2.
    """
    return scores[~dropped].unique().numel() <= 1


@torch.no_grad()
def rloo(
    scores_B: Tensor, groups_B: Tensor, keep_B: Tensor | None = None, across: Across = ONE_PROCESS
) -> Tensor:
    """Return r minus the mean of the group's other rows, which is n/(n - 1)·(r - mean). Shapes: as `grpo`.

    RLOO's reward includes the KL penalty: the sum over tokens of `token_rewards`.
    Source: arXiv 2402.14740, the RLOO estimator.
    """
    groups = _Groups(groups_B, keep_B, across)
    factor_B = groups.sizes_B / (groups.sizes_B - 1).clamp(min=1)
    return (factor_B * groups.centred(scores_B)).to(scores_B.dtype)


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


class _Groups:
    """Sums over the kept rows of each group on all ranks, in float64; every row gets the sum of its own group."""

    def __init__(self, groups_B: Tensor, keep_B: Tensor | None, across: Across) -> None:
        keep_B = torch.ones_like(groups_B, dtype=torch.bool) if keep_B is None else keep_B
        check_rows(groups_B.size(0), groups_B=groups_B, keep_B=keep_B)
        assert keep_B.dtype == torch.bool, f"keep_B must be bool, got {keep_B.dtype}"
        assert not groups_B.is_floating_point(), f"groups are numbered by integers, got {groups_B.dtype}"
        assert groups_B.numel() == 0 or int(groups_B.min()) >= 0, "groups are numbered from 0"
        largest = groups_B.max() if groups_B.numel() else groups_B.new_tensor(-1)
        self._num_groups = int(across.max(largest)) + 1
        self._groups_B, self._keep_B, self._across = groups_B.long(), keep_B, across
        self.sizes_B = self.sum(torch.ones_like(groups_B, dtype=torch.float64))

    def sum(self, values_B: Tensor) -> Tensor:
        kept_B = torch.where(self._keep_B, values_B, 0.0)
        sums_P = kept_B.new_zeros(self._num_groups).index_add_(0, self._groups_B, kept_B)
        return self._across.sum(sums_P)[self._groups_B]

    def largest(self, values_B: Tensor) -> Tensor:
        kept_B = torch.where(self._keep_B, values_B, -torch.inf)
        maxima_P = kept_B.new_full((self._num_groups,), -torch.inf)
        return self._across.max(maxima_P.scatter_reduce(0, self._groups_B, kept_B, "amax"))[self._groups_B]

    def centred(self, values_B: Tensor) -> Tensor:
        """Return the values minus the mean of their group; 0 for rows that are not kept."""
        check_rows(len(self._groups_B), values_B=values_B)
        # Subtract the largest first: equal values then have a mean of exactly 0.
        shifted_B = values_B.double() - self.largest(values_B.double())
        mean_B = self.sum(shifted_B) / self.sizes_B.clamp(min=1)
        return torch.where(self._keep_B, shifted_B - mean_B, 0.0)
