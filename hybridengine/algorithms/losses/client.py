"""Losses that a client of the Tinker API chooses by name for rows of its own. Shape suffixes: B sequences, T positions.

Each is a sum over the T positions of a row, with no prompt and no mean: the client's columns decide what counts. p is the
model's probability of a position's target, q that of the sampler (column `logprobs`), A the advantage, r = p/q:

    cross_entropy        -log p·w                        w of any sign, so that a client can send a gradient of its own
    importance_sampling  -r·A
    ppo                  -min(r·A, clip(r)·A)
    cispo                -clip(r)·log p·A                no gradient through the clipped ratio
    dro                  -(log p·A - beta/2·(log r)^2)   also where A = 0: the second term counts at every position
    gspo                 -min(s·A, clip(s)·A)            s: geometric mean of r over the row's `sequence_ratio_mask`

clip(r) bounds the ratio itself by `clip_low_threshold` and `clip_high_threshold`. s has the same value at all positions
of a row, and at each the gradient of its own log p (GSPO-token). Gradient flows through the model's log-probs only.

Source: tinker-docs.thinkingmachines.ai/tinker/losses; arXiv 1707.06347, equation 7 (ppo); arXiv 2506.13585, equation 4
    (cispo); arXiv 2405.19107 (dro); arXiv 2507.18071, sections 4.1 and 4.3 (gspo).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from hybridengine.algorithms.losses.client_inputs import CLIENT_INPUTS
from hybridengine.algorithms.losses.ratios import (
    bounded_ratios,
    cispo_gains,
    clipped_gains,
    sequence_ratios,
)
from hybridengine.algorithms.masking import check_shapes, zero_masked

Columns = Mapping[str, Tensor]
Settings = Mapping[str, float]

LOSS_SUM = "loss:sum"
"""Metric of every loss: its sum. As in all metrics of the API, the reduction follows the colon."""


def cross_entropy(log_probs_BT: Tensor, columns: Columns, settings: Settings) -> Tensor:
    return -log_probs_BT * columns["weights"]


def importance_sampling(log_probs_BT: Tensor, columns: Columns, settings: Settings) -> Tensor:
    return -bounded_ratios(log_probs_BT - columns["logprobs"]) * columns["advantages"]


def ppo(log_probs_BT: Tensor, columns: Columns, settings: Settings) -> Tensor:
    ratios_BT = bounded_ratios(log_probs_BT - columns["logprobs"])
    return -clipped_gains(ratios_BT, columns["advantages"], *_range(settings))


def cispo(log_probs_BT: Tensor, columns: Columns, settings: Settings) -> Tensor:
    ratios_BT = bounded_ratios(log_probs_BT - columns["logprobs"])
    return -cispo_gains(ratios_BT, log_probs_BT, columns["advantages"], *_range(settings))


def dro(log_probs_BT: Tensor, columns: Columns, settings: Settings) -> Tensor:
    squares_BT = (log_probs_BT - columns["logprobs"]).square()
    return 0.5 * settings["beta"] * squares_BT - log_probs_BT * columns["advantages"]


def gspo(log_probs_BT: Tensor, columns: Columns, settings: Settings) -> Tensor:
    ratios_BT = sequence_ratios(log_probs_BT, columns["logprobs"], columns["sequence_ratio_mask"] != 0)
    return -clipped_gains(ratios_BT, columns["advantages"], *_range(settings))


def _range(settings: Settings) -> tuple[float, float]:
    return settings["clip_low_threshold"], settings["clip_high_threshold"]


CLIENT_LOSSES: Mapping[str, Callable[[Tensor, Columns, Settings], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
"""Name in the API -> (log-probs of the targets, columns, settings), all [B, T] -> losses [B, T]."""


def client_loss(
    loss: str, log_probs_BT: Tensor, columns: Columns, mask_BT: Tensor, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (each row's loss, with gradient; its metrics, without), to be summed over rows of any micro-batches.

    Shapes: all [B, T] -> [B] each.
    Args:
        columns: what the loss needs (`CLIENT_INPUTS`).
        mask_BT: False at padding, which adds nothing and whose entries may be NaN.
        settings: all of the loss's settings (`check_client_loss`).
    """
    needed = {name: columns[name] for name in CLIENT_INPUTS[loss].columns}
    check_shapes(log_probs_BT=log_probs_BT, mask_BR=mask_BT, **needed)
    clean = {name: zero_masked(column_BT.detach(), mask_BT) for name, column_BT in needed.items()}
    # A masked log-prob of 0 makes every loss 0, dro's too.
    losses_B = CLIENT_LOSSES[loss](zero_masked(log_probs_BT, mask_BT), clean, settings).sum(1)
    return losses_B, {LOSS_SUM: losses_B.detach().clone()}
