"""Reward under a limit on cost: PPO-Lagrangian as in Safe-RLHF.

Maximise J_r subject to J_c <= d, through min over the policy, max over lam >= 0, of -J_r + lam·(J_c - d).

Shape suffixes: B sequences, R response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridengine.algorithms.masking import check_shapes, zero_masked
from hybridengine.errors import ConfigError, DataError


@torch.no_grad()
def safe_advantages(
    reward_advantages_BR: Tensor, cost_advantages_BR: Tensor, mask_BR: Tensor, multiplier: float
) -> Tensor:
    """(A_r - lam·A_c)/(1 + lam): the division keeps the step size while the multiplier lam moves.

    Shapes: all [B, R] -> [B, R], 0 at masked entries. Each has its own critic and GAE; whiten both or none.
    Source: arXiv 2310.12773, equation 30 (the policy's update divided by 1 + lam).
    """
    check_shapes(
        reward_advantages_BR=reward_advantages_BR, cost_advantages_BR=cost_advantages_BR, mask_BR=mask_BR
    )
    return zero_masked((reward_advantages_BR - multiplier * cost_advantages_BR) / (1.0 + multiplier), mask_BR)


@dataclass(frozen=True)
class LagrangeMultiplier:
    """lam = exp(log_value), never negative; grows while the mean cost exceeds its limit and falls below it.

    Raises:
        ConfigError: a value that the update cannot start from.
    """

    cost_limit: float
    """d: the largest mean cost of a response."""
    lr: float
    """Step size of `log_value`."""
    max_log_value: float
    """`log_value` stays at or below it: a limit that cannot be kept must not silence the reward for good."""
    log_value: float = 0.0
    """log lam; 0 is lam = 1."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"lr={self.lr} of the Lagrange multiplier must be above 0")
        if not self.log_value <= self.max_log_value:
            raise ConfigError(
                f"log_value={self.log_value} of the Lagrange multiplier exceeds max_log_value={self.max_log_value};"
                " start lower, or raise the limit"
            )

    @property
    def value(self) -> float:
        """lam."""
        return math.exp(self.log_value)

    def updated(self, mean_cost: float) -> LagrangeMultiplier:
        """The multiplier after one SGD step on -(J_c - d)·lam, whose derivative by log lam is itself.

        Args:
            mean_cost: J_c, the mean over the batch's responses of all ranks.
        Raises:
            DataError: the cost is not a finite number.
        Source: arXiv 2310.12773, equation 31 (with J_c there counted from the limit).
        """
        if not math.isfinite(mean_cost):
            raise DataError(
                f"mean_cost={mean_cost} must be a finite number; look for failed rows of the cost model"
            )
        step = self.lr * (mean_cost - self.cost_limit) * self.value
        return replace(self, log_value=min(self.log_value + step, self.max_log_value))
