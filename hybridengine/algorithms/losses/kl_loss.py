"""KL(pi || pi_ref) as a term of the loss: keeps the policy near the reference without touching the rewards.

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

from torch import Tensor

from hybridengine.algorithms.kl import kl_estimator
from hybridengine.algorithms.losses.aggregation import PER_TOKEN, Aggregation, LossStats, SummedLoss
from hybridengine.algorithms.masking import check_shapes, masked_sum, zero_masked


def kl_loss(
    log_probs_BR: Tensor,
    ref_log_probs_BR: Tensor,
    mask_BR: Tensor,
    coefficient: float,
    estimator: str = "k3",
    aggregation: Aggregation = PER_TOKEN,
) -> SummedLoss:
    """coefficient·KL of every valid token by an estimator of kl.py, summed as `aggregation` says.

    Gradient flows through `log_probs_BR` only. What its expectation is, over tokens sampled by pi itself, differs from
    what the estimator's value is:

        k1    0: the value is unbiased, but as a loss it pulls nowhere and only adds noise
        k2    grad KL(pi || pi_ref), though the value is biased
        k3    grad KL(pi_ref || pi), the other direction; the two agree to first order near pi = pi_ref. GRPO's choice

    Tokens sampled by an older policy make all three approximate: nothing here weighs them by pi/pi_old.

    Shapes: all [B, R].
    Stats, as a mean per token once divided: actor/kl_loss (the estimator's value, without the coefficient).
    Raises:
        ConfigError: there is no such estimator.
    Source: arXiv 2402.03300, equations 3 and 4; gradients: arXiv 2510.01555.
    """
    check_shapes(log_probs_BR=log_probs_BR, ref_log_probs_BR=ref_log_probs_BR, mask_BR=mask_BR)
    kl_BR = kl_estimator(estimator)(
        zero_masked(log_probs_BR, mask_BR), zero_masked(ref_log_probs_BR.detach(), mask_BR)
    )
    loss_sum = coefficient * aggregation.loss_sum(kl_BR, mask_BR)
    return SummedLoss(loss_sum, LossStats({"actor/kl_loss": masked_sum(kl_BR.detach(), mask_BR)}))
