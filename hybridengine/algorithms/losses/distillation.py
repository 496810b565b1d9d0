"""Reverse KL divergence from a teacher over its most likely tokens, as a loss.

Shapes: b rows, r response tokens, K tokens of the teacher at each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridengine.algorithms.losses.aggregation import Aggregation, SummedLoss

SMALLEST_REST = 1e-6
"""Smallest probability of all other tokens, which is the rounding error of a sum in float32."""


def divergence(log_probs_brK: Tensor, teacher_brK: Tensor) -> Tensor:
    """Return KL(pi || pi_teacher) of the distributions over K tokens and the rest as one more token, [b, r].

    It is at most the divergence over the vocabulary, and equal to it if the K tokens are all of it.

    Source: GKD, arXiv 2306.13649, section 3 (reverse KL); data processing inequality for the rest.
    """
    own_brK, theirs_brK = log_probs_brK.exp(), teacher_brK.exp()
    rest_br, others_br = (
        (1.0 - probs_brK.sum(-1)).clamp(min=SMALLEST_REST) for probs_brK in (own_brK, theirs_brK)
    )
    listed_br = (own_brK * (log_probs_brK - teacher_brK)).sum(-1)
    return listed_br + rest_br * (rest_br.log() - others_br.log())


def teacher_loss(
    log_probs_brK: Tensor, teacher_brK: Tensor, mask_br: Tensor, aggregation: Aggregation
) -> SummedLoss:
    """Return the sum of the divergences of valid tokens, with the gradient of the policy's log-probs.

    Stats: actor/teacher_kl, the mean over valid tokens.
    """
    divergence_br = divergence(log_probs_brK, teacher_brK.detach())
    loss_sum = aggregation.loss_sum(divergence_br, mask_br)
    with torch.no_grad():
        return SummedLoss(loss_sum, aggregation.stats("actor/teacher_kl", loss_sum, mask_br))
