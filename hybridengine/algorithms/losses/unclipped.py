"""Policy losses without a clip: SAPO, whose gates close smoothly, and the policy gradient itself (GPG).

Both are called as function(log_probs, columns, algorithm, actor, aggregation) with the columns of `clipped_loss`.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hybridengine.algorithms.losses.aggregation import Aggregation, SummedLoss
from hybridengine.algorithms.losses.parts import cleaned, summed_loss
from hybridengine.algorithms.losses.ratios import bounded_ratios, sapo_gains
from hybridengine.config.algorithm import Algorithm
from hybridengine.config.role_sections import ActorSection


def sapo_loss(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    algorithm: Algorithm,
    actor: ActorSection,
    aggregation: Aggregation,
) -> SummedLoss:
    """Return SAPO's loss, -w·f(r)·A with f(r) = 4/tau·sigmoid(tau·(r - 1)), of all valid tokens, summed by `aggregation`.

    tau is `algorithm.sapo.positive_temperature` where A > 0 and the negative one elsewhere. As r = pi/pi_old leaves 1,
    the slope of f falls smoothly from 1: tokens far from the old policy count less, and none drops out at a threshold.
    As published, `actor.loss_aggregation` is sequence.

    Source: arXiv 2511.20347.
    """
    mask_BR, gates = columns["mask"], algorithm.sapo
    new_BR, old_BR, advantages_BR = cleaned(
        log_probs_BR, columns["log_probs"], columns["advantages"], mask_BR
    )
    ratios_BR = bounded_ratios(new_BR - old_BR)
    gains_BR = sapo_gains(ratios_BR, advantages_BR, gates.positive_temperature, gates.negative_temperature)
    return summed_loss(gains_BR, ratios_BR, new_BR, old_BR, mask_BR, columns.get("weights"), aggregation)


def gpg_loss(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    algorithm: Algorithm,
    actor: ActorSection,
    aggregation: Aggregation,
) -> SummedLoss:
    """Return the policy gradient's loss, -w·A·log pi, of all valid tokens, summed by `aggregation`.

    Without a ratio, nothing bounds an update of rows that are not on-policy: take one optimizer step per iteration, or a
    rollout correction.

    Source: GPG, arXiv 2504.02546 (its advantages: `algorithm.normalize_std=false` and
        `algorithm.rescale_equal=true` of GRPO).
    """
    mask_BR = columns["mask"]
    new_BR, old_BR, advantages_BR = cleaned(
        log_probs_BR, columns["log_probs"], columns["advantages"], mask_BR
    )
    return summed_loss(
        new_BR * advantages_BR,
        bounded_ratios(new_BR - old_BR),
        new_BR,
        old_BR,
        mask_BR,
        columns.get("weights"),
        aggregation,
    )
