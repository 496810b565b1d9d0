"""Advantages of responses that are compared with the others to the same prompt.

Rows of one prompt may be anywhere: on several ranks, in any order. The estimators therefore take the number of each row's
group (with G samples per prompt: row number // G), and all ranks take part in every call, even without rows. A group of
one has no baseline and gives 0; a group without variance gives exactly 0, not a rounding error divided by epsilon. Rows
whose `keep_B` is False are excluded from all means and give 0; their scores may be NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.masking import check_rows, check_shapes, over_tokens, whiten, zero_masked

GROUP_EPSILON = 1e-6
"""Constant added to a group's standard deviation."""


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
    advantages_B = groups.centred(scores_B)
    if normalize_std:
        advantages_B = advantages_B / groups.deviations(advantages_B)
    return advantages_B.to(scores_B.dtype)


@torch.no_grad()
def pass_at_k(
    scores_B: Tensor,
    groups_B: Tensor,
    keep_B: Tensor | None = None,
    across: Across = ONE_PROCESS,
    normalize_std: bool = True,
) -> Tensor:
    """Return max over the group minus max over its other rows, by default divided by std + 1e-6 as in `grpo`.

    This is the lead of a group's best row over the second best, and 0 for all others, also for two equal best rows. Its
    policy gradient is that of the expected best score of k responses, the size of a group.

    Shapes: as `grpo`.
    Source: arXiv 2503.19595 (the pass@k objective with a leave-one-out baseline).
    """
    groups = _Groups(groups_B, keep_B, across)
    best_B = groups.largest(scores_B.double())
    is_best_B = groups.keep_B & (scores_B == best_B)
    others_B = torch.where(is_best_B, -torch.inf, scores_B.double())
    lead_B = best_B - groups.largest(others_B)
    is_alone_B = is_best_B & (groups.sum(is_best_B.double()) == 1) & (groups.sizes_B > 1)
    advantages_B = torch.where(is_alone_B, lead_B, 0.0)
    if normalize_std:
        advantages_B = advantages_B / groups.deviations(groups.centred(scores_B))
    return advantages_B.to(scores_B.dtype)


@torch.no_grad()
def length_weighted(
    scores_B: Tensor,
    lengths_B: Tensor,
    groups_B: Tensor,
    keep_B: Tensor | None = None,
    across: Across = ONE_PROCESS,
) -> Tensor:
    """Return r minus the mean of the group weighted by lengths, sum(l·r)/sum(l).

    If the squared norm of a response's gradient is proportional to its length l, this baseline minimises the variance of
    the policy gradient.

    Shapes: lengths_B [B], valid tokens of each row; others as `grpo`.
    Source: OPO, arXiv 2505.23585 (the optimal reward baseline).
    """
    check_rows(len(groups_B), lengths_B=lengths_B)
    groups = _Groups(groups_B, keep_B, across)
    return groups.centred(scores_B, lengths_B.double()).to(scores_B.dtype)


@torch.no_grad()
def optimal_token_baseline(
    scores_B: Tensor,
    energies_BR: Tensor,
    mask_BR: Tensor,
    groups_B: Tensor,
    keep_B: Tensor | None = None,
    across: Across = ONE_PROCESS,
) -> Tensor:
    """Return r - B_t of every token, where B_t = sum(r·W_t)/(sum(W_t) + 1e-8) over the group's rows with a t-th token.

    W_t is the sum of `energies_BR` from the row's first valid token to its t-th, and t counts valid tokens only. A token
    that no other row of the group has a counterpart of has no baseline: B_t = 0.

    Shapes: scores_B, groups_B and keep_B as `grpo`, energies_BR and mask_BR [B, R] -> [B, R], 0 at masked entries.
    Source: Y. Li et al., "The optimal token baseline: variance reduction for long-horizon LLM-RL", PMLR 306, 2026.
    """
    check_shapes(energies_BR=energies_BR, mask_BR=mask_BR)
    groups = _Groups(groups_B, keep_B, across)
    # Valid tokens first, so that column t holds every row's t-th.
    order_BR = (~mask_BR).long().argsort(dim=1, stable=True)
    valid_BR = mask_BR.gather(1, order_BR) & groups.keep_B[:, None]
    weights_BR = zero_masked(energies_BR.double(), mask_BR).gather(1, order_BR).cumsum(1)
    weights_BR = zero_masked(weights_BR, valid_BR)
    kept_B1 = torch.where(groups.keep_B, scores_B.double(), 0.0)[:, None]
    baselines_BR = groups.sum(weights_BR * kept_B1) / (groups.sum(weights_BR) + 1e-8)
    baselines_BR = torch.where(groups.sum(valid_BR.double()) > 1, baselines_BR, 0.0)
    has_others_B1 = (groups.sizes_B > 1)[:, None]
    sorted_BR = torch.where(valid_BR & has_others_B1, kept_B1 - baselines_BR, 0.0)
    return torch.zeros_like(sorted_BR).scatter(1, order_BR, sorted_BR).to(energies_BR.dtype)


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


def whitened_differences(
    scores_B: Tensor,
    groups_B: Tensor,
    mask_BR: Tensor,
    keep_B: Tensor | None = None,
    across: Across = ONE_PROCESS,
) -> Tensor:
    """Return r - mean of the group at each valid token, scaled to mean 0 and variance 1 over those of the whole batch.

    Shapes: scores_B, groups_B and keep_B as `grpo`, mask_BR [B, R] -> [B, R], 0 at masked entries.
    Source: REINFORCE++ with a group baseline, arXiv 2501.03262.
    """
    differences_B = grpo(scores_B, groups_B, keep_B, across, normalize_std=False)
    return whiten(over_tokens(differences_B, mask_BR), mask_BR, across=across)


@torch.no_grad()
def equal_rescaling(
    scores_B: Tensor, groups_B: Tensor, keep_B: Tensor | None = None, across: Across = ONE_PROCESS
) -> float:
    """Return B/(B - M), of the B kept rows of all ranks and the M of them in groups whose scores are equal; 1 if B = M.

    Those M rows have no gradient but count in the loss's mean, which the factor makes up for.

    Shapes: as `grpo`.
    Source: GPG, arXiv 2504.02546 (accurate gradient estimation).
    """
    groups = _Groups(groups_B, keep_B, across)
    differ_B = groups.largest(scores_B.double()) > -groups.largest(-scores_B.double())
    counts = across.sum(torch.stack([groups.keep_B.sum(), (groups.keep_B & differ_B).sum()]))
    num_kept, num_differing = counts.tolist()
    return num_kept / num_differing if num_differing else 1.0


def has_equal_scores(scores: Tensor, dropped: Tensor) -> bool:
    """Return whether the rows of a group have no advantages: all scores, but of rows that are dropped, are the same.

    Shapes: scores [n], dropped bool [n].
    Source: DAPO, arXiv 2503.14476, section 3.2.
    """
    return scores[~dropped].unique().numel() <= 1


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
        self._groups_B, self.keep_B, self._across = groups_B.long(), keep_B, across
        self.sizes_B = self.sum(torch.ones_like(groups_B, dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums of each row's group. Shapes: [B] or [B, R], as the result."""
        keep = self.keep_B.reshape(-1, *[1] * (values.dim() - 1))
        kept = torch.where(keep, values, 0.0)
        sums = kept.new_zeros(self._num_groups, *values.shape[1:]).index_add_(0, self._groups_B, kept)
        return self._across.sum(sums)[self._groups_B]

    def largest(self, values_B: Tensor) -> Tensor:
        kept_B = torch.where(self.keep_B, values_B, -torch.inf)
        maxima_P = kept_B.new_full((self._num_groups,), -torch.inf)
        return self._across.max(maxima_P.scatter_reduce(0, self._groups_B, kept_B, "amax"))[self._groups_B]

    def centred(self, values_B: Tensor, weights_B: Tensor | None = None) -> Tensor:
        """Return the values minus the mean of their group, by default unweighted; 0 for rows that are not kept."""
        check_rows(len(self._groups_B), values_B=values_B)
        weights_B = torch.ones_like(values_B, dtype=torch.float64) if weights_B is None else weights_B
        # Subtract the largest first: equal values then have a mean of exactly 0.
        shifted_B = values_B.double() - self.largest(values_B.double())
        mean_B = self.sum(weights_B * shifted_B) / self.sum(weights_B).clamp(min=1)
        return torch.where(self.keep_B, shifted_B - mean_B, 0.0)

    def deviations(self, centred_B: Tensor) -> Tensor:
        """Return the standard deviation of each row's group, which divides by n - 1, plus `GROUP_EPSILON`."""
        variance_B = self.sum(centred_B.square()) / (self.sizes_B - 1).clamp(min=1)
        return variance_B.sqrt() + GROUP_EPSILON
