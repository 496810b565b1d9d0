"""One file per loss; `aggregation` says how losses of micro-batches become the gradient of a mini-batch."""

from hybridengine.algorithms.losses.aggregation import TokenLoss, TokenStats, global_token_mean, merge_stats
from hybridengine.algorithms.losses.entropy import entropy_bonus
from hybridengine.algorithms.losses.policy import policy_loss
from hybridengine.algorithms.losses.value import value_loss

__all__ = [
    "TokenLoss",
    "TokenStats",
    "entropy_bonus",
    "global_token_mean",
    "merge_stats",
    "policy_loss",
    "value_loss",
]
