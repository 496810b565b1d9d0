"""Direct preference optimisation. Shape suffixes: B sequences, R response tokens, N pairs of responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridengine.algorithms.losses.aggregation import Aggregation, LossStats, SummedLoss
from hybridengine.algorithms.masking import check_rows, check_shapes, zero_masked
from hybridengine.config.role_sections import ActorSection


def sequence_log_probs(log_probs_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Return log pi(response | prompt), the sum over each row's valid tokens, 0 if empty. Shapes: [B, R] -> [B]."""
    check_shapes(log_probs_BR=log_probs_BR, mask_BR=mask_BR)
    return zero_masked(log_probs_BR, mask_BR).sum(1)


def dpo_loss(
    chosen_log_probs_N: Tensor,
    rejected_log_probs_N: Tensor,
    ref_chosen_log_probs_N: Tensor,
    ref_rejected_log_probs_N: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    keep_N: Tensor | None = None,
) -> SummedLoss:
    """Return the sum over pairs of -(1 - e)·log sigmoid(m) - e·log sigmoid(-m), to be divided by the number kept.

        m = beta·[(log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected)]

    The label smoothing e is the probability that a pair's order is wrong; 0 is plain DPO. Gradient flows through the
    first two arguments only. Both responses of a pair must be in the same micro-batch, because the loss is not a sum
    over responses. It is a sum over pairs: the sums of parts add up to that of the whole.

    Shapes: all [N], log-probabilities of whole responses (see `sequence_log_probs`).
    Args:
        keep_N: bool, False for excluded pairs: ties, failed rewards, padding. Their entries may be NaN.
    Stats, as means per kept pair: actor/dpo_loss, actor/dpo_accuracy (m > 0; a tie is not accurate),
        actor/dpo_margin (m), actor/dpo_chosen_reward and actor/dpo_rejected_reward (beta·(log pi - log pi_ref)).
    Source: arXiv 2305.18290, equation 7; pairs sampled by the policy itself: arXiv 2402.04792, section 3; label
        smoothing: E. Mitchell, "A note on DPO with noisy preferences & relationship to IPO", 2023.
    """
    assert 0.0 <= label_smoothing < 0.5, f"label_smoothing={label_smoothing} must be at least 0 and below 0.5"

    def losses(margin_N: Tensor) -> Tensor:
        return -(1.0 - label_smoothing) * logsigmoid(margin_N) - label_smoothing * logsigmoid(-margin_N)

    chosen_N, rejected_N = chosen_log_probs_N, rejected_log_probs_N
    references = ref_chosen_log_probs_N, ref_rejected_log_probs_N
    return _summed(chosen_N, rejected_N, *references, beta, keep_N, losses)


def _summed(
    chosen_log_probs_N: Tensor,
    rejected_log_probs_N: Tensor,
    ref_chosen_log_probs_N: Tensor,
    ref_rejected_log_probs_N: Tensor,
    beta: float,
    keep_N: Tensor | None,
    losses: Callable[[Tensor], Tensor],
) -> SummedLoss:
    """Return the sum over kept pairs of `losses` of their margins, with the statistics of `dpo_loss`."""
    kept_N = torch.ones_like(chosen_log_probs_N, dtype=torch.bool) if keep_N is None else keep_N
    columns = {
        "chosen_log_probs_N": chosen_log_probs_N,
        "rejected_log_probs_N": rejected_log_probs_N,
        "ref_chosen_log_probs_N": ref_chosen_log_probs_N.detach(),
        "ref_rejected_log_probs_N": ref_rejected_log_probs_N.detach(),
    }
    check_rows(chosen_log_probs_N.size(0), **columns, keep_N=kept_N)
    chosen_N, rejected_N, ref_chosen_N, ref_rejected_N = (zero_masked(c, kept_N) for c in columns.values())
    chosen_reward_N = beta * (chosen_N - ref_chosen_N)
    rejected_reward_N = beta * (rejected_N - ref_rejected_N)
    margin_N = chosen_reward_N - rejected_reward_N
    loss_sum = zero_masked(losses(margin_N), kept_N).sum()
    sums = {
        "actor/dpo_loss": loss_sum.detach().clone(),
        "actor/dpo_accuracy": (margin_N > 0).to(margin_N.dtype).sum(),
        "actor/dpo_margin": margin_N.detach().sum(),
        "actor/dpo_chosen_reward": chosen_reward_N.detach().sum(),
        "actor/dpo_rejected_reward": rejected_reward_N.detach().sum(),
    }
    return SummedLoss(loss_sum, LossStats(sums, counts=dict.fromkeys(sums, kept_N.sum())))


def preference_loss(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    algorithm: Any,
    actor: ActorSection,
    aggregation: Aggregation,
) -> SummedLoss:
    """Return `dpo_loss` of rows in pairs, with the better response first: the default of `algorithm.loss` of DPO.

    The columns are `mask` and `ref_log_probs` [B, R], and `told` [B, R], False for both rows of an uninformative pair.
    """
    pairs, keep_N = _pairs(log_probs_BR, columns), columns["told"][0::2, 0]
    return dpo_loss(*pairs, algorithm.beta, algorithm.label_smoothing, keep_N)


def ipo_loss(
    log_probs_BR: Tensor,
    columns: Mapping[str, Tensor],
    algorithm: Any,
    actor: ActorSection,
    aggregation: Aggregation,
) -> SummedLoss:
    """Return the sum over pairs of (m/beta - 1/(2·beta))^2, with the margin m and the columns of `preference_loss`.

    m/beta is the paper's h, of whole responses; it does not grow without a bound as in DPO, but towards 1/(2·beta).

    Source: arXiv 2310.12036, equation 17, whose tau is beta.
    """
    beta = algorithm.beta

    def losses(margin_N: Tensor) -> Tensor:
        return (margin_N / beta - 0.5 / beta).square()

    return _summed(*_pairs(log_probs_BR, columns), beta, columns["told"][0::2, 0], losses)


def _pairs(log_probs_BR: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the log-probs of chosen and rejected responses, then those of the reference, [N] each."""
    own_B, reference_B = (
        sequence_log_probs(values_BR, columns["mask"])
        for values_BR in (log_probs_BR, columns["ref_log_probs"])
    )
    return own_B[0::2], own_B[1::2], reference_B[0::2], reference_B[1::2]
