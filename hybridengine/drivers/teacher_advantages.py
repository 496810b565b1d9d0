"""Advantages of on-policy distillation, computed on the ranks that hold a batch's rows (see drivers/advantages.py)."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase

from hybridengine.algorithms import group_advantages
from hybridengine.algorithms.across import Across
from hybridengine.algorithms.advantages import discounted_returns
from hybridengine.algorithms.kl import k1
from hybridengine.algorithms.masking import over_tokens
from hybridengine.drivers.advantages import counted_rows
from hybridengine.drivers.distill import Distill
from hybridengine.rows.protocols import ROW_NUMBERS


def distill(rows: TensorDictBase, across: Across, algorithm: Distill, samples: int) -> TensorDict:
    """Return `advantages` [B, R]: the sum of gamma^i·(log pi_teacher - log pi) of a token and the i-th after it, 0 with
    `top_k`, and `reward_coef` times the response's advantage among its group.

    The log-ratio is the estimator k1, whatever `algorithm.kl_estimator` measures: the policy gradient of no other one has
    the gradient of the KL divergence as its expectation.
    """
    counted = counted_rows(rows, algorithm)
    mask = counted.mask_BR
    ratios = (
        torch.zeros_like(rows["log_probs"])
        if algorithm.top_k
        else -k1(rows["log_probs"], rows["ref_log_probs"])
    )
    estimates = discounted_returns(ratios, mask, algorithm.gamma)
    if algorithm.reward_coef:
        groups = rows[ROW_NUMBERS] // samples
        by_row = group_advantages.grpo(counted.scores_B, groups, counted.keep_B, across)
        estimates = estimates + algorithm.reward_coef * over_tokens(by_row, mask)
    return counted.columns(advantages=estimates)
