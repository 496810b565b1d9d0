"""Advantages of a response over the others that answer the same prompt: GRPO, Dr.GRPO, RLOO. No critic.

Rows of one prompt may be anywhere: on several ranks, in any order. So every row comes with the number of its group
(with G samples per prompt: row number // G), and all ranks take part in every call, those without rows too.

    group of one      nothing to compare with: 0
    zero variance     exactly 0 for all, not a rounding error divided by epsilon
    dropped rows      `keep_B` False: count in no mean, get 0; their scores may be NaN

Shape suffixes: B sequences, P groups (prompts) of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.masking import check_rows

GROUP_EPSILON = 1e-6
"""Added to a group's standard deviation."""


@torch.no_grad()
def grpo(
    scores_B: Tensor, groups_B: Tensor, keep_B: Tensor | None = None, across: Across = ONE_PROCESS
) -> Tensor:
    """(r - mean)/(std + 1e-6) over the rows of each group, std with n - 1 in its divisor.

    Shapes: scores_B [B], groups_B [B] integers from 0 (numbers without rows cost a few bytes each), keep_B bool [B]
        -> [B]. masking.over_tokens gives it to every token.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    groups = _Groups(groups_B, _kept(scores_B, keep_B), across)
    centred_B = groups.centred(scores_B)
    variance_B = groups.sum(centred_B.square()) / (groups.sizes_B - 1).clamp(min=1)
    return (centred_B / (variance_B.sqrt() + GROUP_EPSILON)).to(scores_B.dtype)


@torch.no_grad()
def dr_grpo(
    scores_B: Tensor, groups_B: Tensor, keep_B: Tensor | None = None, across: Across = ONE_PROCESS
) -> Tensor:
    """r - mean over the rows of each group: GRPO without the standard deviation, which favours easy and hard prompts.

    Its loss is no mean per sequence either: see `Aggregation("sequence_sum")`. Shapes: as `grpo`.
    Source: arXiv 2503.20783, section 3.
    """
    groups = _Groups(groups_B, _kept(scores_B, keep_B), across)
    return groups.centred(scores_B).to(scores_B.dtype)


@torch.no_grad()
def rloo(
    scores_B: Tensor, groups_B: Tensor, keep_B: Tensor | None = None, across: Across = ONE_PROCESS
) -> Tensor:
    """r less the mean of the group's other rows, which is n/(n - 1)·(r - mean). Shapes: as `grpo`.

    RLOO's reward includes the KL penalty: the sum over tokens of `token_rewards`.
    Source: arXiv 2402.14740, the RLOO estimator.
    """
    groups = _Groups(groups_B, _kept(scores_B, keep_B), across)
    factor_B = groups.sizes_B / (groups.sizes_B - 1).clamp(min=1)
    return (factor_B * groups.centred(scores_B)).to(scores_B.dtype)


class _Groups:
    """What the kept rows of each group have together, of all ranks; float64, and for every row its own group's."""

    def __init__(self, groups_B: Tensor, keep_B: Tensor, across: Across) -> None:
        check_rows(keep_B.size(0), groups_B=groups_B, keep_B=keep_B)
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
        """Values less the mean of their group; 0 for rows that are not kept."""
        # Less the largest first: equal values then have a mean of exactly 0, whatever they are.
        shifted_B = values_B.double() - self.largest(values_B.double())
        mean_B = self.sum(shifted_B) / self.sizes_B.clamp(min=1)
        return torch.where(self._keep_B, shifted_B - mean_B, 0.0)


def _kept(scores_B: Tensor, keep_B: Tensor | None) -> Tensor:
    if keep_B is None:
        return torch.ones_like(scores_B, dtype=torch.bool)
    assert keep_B.dtype == torch.bool, f"keep_B must be bool, got {keep_B.dtype}"
    return keep_B
