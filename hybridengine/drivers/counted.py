"""Which rows and tokens of a batch count, and by how much: what the advantages of every dataflow begin with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.algorithms.correction import RolloutWeights, rollout_weights
from hybridengine.algorithms.kl import KL_ESTIMATORS
from hybridengine.algorithms.masking import response_mask, zero_masked
from hybridengine.config.algorithm import Algorithm


@dataclass(frozen=True)
class Counted:
    """Rows of a batch, without what must count nowhere."""

    keep_B: Tensor
    """Rows that have a score, and whose rollout is close enough to the training policy."""
    mask_BR: Tensor
    """Valid tokens of the rows that are kept."""
    scores_B: Tensor
    """0 where a row is not kept."""
    kl_BR: Tensor
    """From the reference, 0 where masked."""
    weights_BR: Tensor | None
    """Of the rollout correction."""

    def columns(self, **estimates: Tensor) -> TensorDict:
        """`estimates`, and beside them what the updates read: `keep`, and `weights` where there is a correction."""
        found = {**estimates, "keep": self.keep_B}
        if self.weights_BR is not None:
            found["weights"] = self.weights_BR
        return TensorDict(found, batch_size=[len(self.keep_B)])  # pyright: ignore[reportArgumentType]


def correction_weights(rows: TensorDictBase, mask_BR: Tensor, algorithm: Algorithm) -> RolloutWeights | None:
    """What the run's rollout correction says of rows; None where it has none."""
    correction = algorithm.correction
    if correction is None:
        return None
    log_probs = rows["log_probs"], rows["rollout_log_probs"]
    return rollout_weights(correction.name, *log_probs, mask_BR, correction.high, correction.low)


def counted_rows(rows: TensorDictBase, algorithm: Algorithm) -> Counted:
    """Return the parts of `rows` (`drivers.dataflow.COLUMNS`) that count, after drops and rollout correction."""
    mask = response_mask(rows["response_lengths"], rows["log_probs"].size(1))
    keep, weights = ~rows["dropped"], None
    if (found := correction_weights(rows, mask & keep[:, None], algorithm)) is not None:
        keep, weights = keep & found.keep_B, found.weights_BR
    mask = mask & keep[:, None]
    kl = zero_masked(KL_ESTIMATORS[algorithm.kl_estimator](rows["log_probs"], rows["ref_log_probs"]), mask)
    scores = torch.where(keep, rows["scores"], torch.zeros_like(rows["scores"]))
    return Counted(keep, mask, scores, kl, weights)
