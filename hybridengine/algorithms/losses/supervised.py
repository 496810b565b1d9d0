"""Supervised loss: the mean negative log-probability of responses of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hybridengine.algorithms.losses.aggregation import Aggregation, SummedLoss
from hybridengine.config.role_sections import ActorSection


def negative_log_likelihood(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    algorithm: Any,
    actor: ActorSection,
    aggregation: Aggregation,
) -> SummedLoss:
    """Return the sum of -log pi over the valid tokens: the default of `algorithm.loss` of SFT. It reads `mask` [B, R]."""
    mask_BR = columns["mask"]
    loss_sum = aggregation.loss_sum(-log_probs_BR, mask_BR)
    return SummedLoss(loss_sum, aggregation.stats("actor/sft_loss", loss_sum, mask_BR))
