"""One file per loss; `aggregation` says how losses of micro-batches become the gradient of a mini-batch."""

from hybridengine.algorithms.losses.aggregation import (
    PER_SEQUENCE,
    PER_TOKEN,
    Aggregation,
    LossStats,
    SummedLoss,
    global_mean,
    merge_stats,
)
from hybridengine.algorithms.losses.dpo import dpo_loss, sequence_log_probs
from hybridengine.algorithms.losses.entropy import entropy_bonus
from hybridengine.algorithms.losses.kl_loss import kl_loss
from hybridengine.algorithms.losses.policy import policy_loss
from hybridengine.algorithms.losses.value import value_loss

__all__ = [
    "PER_SEQUENCE",
    "PER_TOKEN",
    "Aggregation",
    "LossStats",
    "SummedLoss",
    "dpo_loss",
    "entropy_bonus",
    "global_mean",
    "kl_loss",
    "merge_stats",
    "policy_loss",
    "sequence_log_probs",
    "value_loss",
]
