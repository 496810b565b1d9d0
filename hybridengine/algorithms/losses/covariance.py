"""Losses that keep the policy's entropy: they restrain the few tokens whose update lowers it most (clip-cov, kl-cov).

Both are called as function(log_probs, columns, algorithm, actor, aggregation) with the columns of `clipped_loss` and
`covariant`, bool [B, R], the tokens that algorithms/covariance.py has chosen from the whole batch.

Shape suffixes: B sequences, R response tokens.
Source: "The entropy mechanism of reinforcement learning for reasoning language models", arXiv 2505.22617, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hybridengine.algorithms.losses.aggregation import Aggregation, LossStats, SummedLoss
from hybridengine.algorithms.losses.parts import cleaned, summed_loss
from hybridengine.algorithms.losses.policy import clipped_loss
from hybridengine.algorithms.losses.ratios import bounded_ratios
from hybridengine.algorithms.masking import masked_sum
from hybridengine.config.algorithm import Algorithm
from hybridengine.config.role_sections import ActorSection


def clip_cov_loss(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    algorithm: Algorithm,
    actor: ActorSection,
    aggregation: Aggregation,
) -> SummedLoss:
    """Return clip-cov's loss, which is `clipped_loss` without the chosen tokens; these still count in the mean.

    Stats: those of `policy_loss`, and actor/covariant_fraction, the share of the chosen tokens.
    """
    free_BR = (~columns["covariant"]).to(log_probs_BR.dtype)
    weights_BR = columns.get("weights")
    weights_BR = free_BR if weights_BR is None else free_BR * weights_BR
    loss = clipped_loss(log_probs_BR, {**columns, "weights": weights_BR}, algorithm, actor, aggregation)
    return loss + _chosen(columns, loss)


def kl_cov_loss(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    algorithm: Algorithm,
    actor: ActorSection,
    aggregation: Aggregation,
) -> SummedLoss:
    """Return kl-cov's loss, -w·(r·A - kl_weight·|log r|·[chosen]) of all valid tokens, summed by `aggregation`.

    r = pi/pi_old, without a clip. |log r| holds the chosen tokens near the old policy, as in the paper's own code; it has
    no gradient at r = 1.

    Stats: those of `policy_loss` without clip fractions, and actor/covariant_fraction, the share of the chosen tokens.
    """
    mask_BR = columns["mask"]
    new_BR, old_BR, advantages_BR = cleaned(
        log_probs_BR, columns["log_probs"], columns["advantages"], mask_BR
    )
    ratios_BR = bounded_ratios(new_BR - old_BR)
    penalties_BR = algorithm.covariance.kl_weight * (new_BR - old_BR).abs() * columns["covariant"]
    gains_BR = ratios_BR * advantages_BR - penalties_BR
    loss = summed_loss(gains_BR, ratios_BR, new_BR, old_BR, mask_BR, columns.get("weights"), aggregation)
    return loss + _chosen(columns, loss)


def _chosen(columns: Mapping[str, Tensor], loss: SummedLoss) -> SummedLoss:
    """Return a loss of 0 with the number of chosen tokens."""
    nothing = loss.loss_sum.detach().new_zeros(())
    chosen = masked_sum(columns["covariant"].to(nothing.dtype), columns["mask"])
    return SummedLoss(nothing, LossStats({"actor/covariant_fraction": chosen}))
