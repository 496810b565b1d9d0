"""Tokens whose update changes the policy's entropy most: those with a high covariance of log-prob and advantage.

The covariance of a token is (log pi - mean log pi)·(A - mean A), with means over all trained tokens of the batch. A
likely token with a high advantage lowers the entropy; a few such tokens account for most of its decline. Log-probs are
those of the policy before the update, as in its first optimizer step, so that the choice is made once for the whole
batch and does not depend on mini-batches, micro-batches or ranks.

Shape suffixes: B sequences, R response tokens.
Source: "The entropy mechanism of reinforcement learning for reasoning language models", arXiv 2505.22617, section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.masking import check_shapes, masked_sum, zero_masked

SIGN_BIT = 2**63


@torch.no_grad()
def covariances(
    log_probs_BR: Tensor, advantages_BR: Tensor, mask_BR: Tensor, across: Across = ONE_PROCESS
) -> Tensor:
    """Return the centred product of log-prob and advantage of each valid token. Shapes: all [B, R] -> [B, R], float64."""
    check_shapes(log_probs_BR=log_probs_BR, advantages_BR=advantages_BR, mask_BR=mask_BR)
    count = across.sum(mask_BR.sum()).clamp(min=1)
    product_BR = torch.ones_like(mask_BR, dtype=torch.float64)
    for values_BR in (log_probs_BR.double(), advantages_BR.double()):
        mean = across.sum(masked_sum(values_BR, mask_BR)) / count
        product_BR = product_BR * (values_BR - mean)
    return zero_masked(product_BR, mask_BR)


@torch.no_grad()
def largest_entries(
    values_BR: Tensor, draws_BR: Tensor, mask_BR: Tensor, count: int, across: Across = ONE_PROCESS
) -> Tensor:
    """Return a mask of the `count` entries under `mask_BR` with the largest values on all ranks.

    Of equal ones, those with the largest `draws_BR` are taken, which differ. If there are fewer entries, all are.

    Shapes: all [B, R] -> bool [B, R]. Collective.
    """
    above_BR, equal_BR = _split(values_BR, mask_BR, count, across)
    missing = count - int(across.sum(above_BR.sum()))
    return above_BR | torch.logical_or(*_split(draws_BR, equal_BR, missing, across))


def _split(values_BR: Tensor, mask_BR: Tensor, count: int, across: Across) -> tuple[Tensor, Tensor]:
    """Return masks of the entries above the `count`-th largest one, and of those equal to it."""
    # As integers, float64 numbers of one sign are in order; those of negative numbers are reversed.
    bits_BR = values_BR.double().view(torch.int64)
    keys_BR = torch.where(bits_BR < 0, bits_BR ^ (SIGN_BIT - 1), bits_BR)
    low, high = -SIGN_BIT, SIGN_BIT - 1
    while low < high:  # 64 times: at least `count` entries are `low` or more, if there are as many at all
        middle = low + (high - low + 1) // 2
        if int(across.sum((mask_BR & (keys_BR >= middle)).sum())) >= count:
            low = middle
        else:
            high = middle - 1
    return mask_BR & (keys_BR > low), mask_BR & (keys_BR == low)
