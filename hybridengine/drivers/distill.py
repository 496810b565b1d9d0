"""On-policy distillation: the actor draws responses, and a frozen teacher judges every token of them.

A token's reward is the teacher's log-prob less the actor's, whose expectation over the actor's draws is minus the reverse
KL divergence. Without a discount of its own a token answers for itself alone.

Source: Thinking Machines Lab, "On-Policy Distillation", 2025; with `gamma` 1 it is the policy gradient of MiniLLM,
arXiv 2306.08543, section 2.2. GKD, arXiv 2306.13649, has the same objective for its own samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridengine.config.algorithm import Conflict
from hybridengine.config.values import ImportPath, NonNegative, Share
from hybridengine.drivers.dataflow import CriticFree
from hybridengine.drivers.roles import Roles

FROM_TEACHER = {"ref_log_probs": "teacher_log_probs"}
"""Renames the teacher's column: the KL divergence is measured from it."""


class Distill(CriticFree):
    """Advantages are minus the reverse KL divergence from a teacher, on request with those of the reward."""

    roles = ("actor", "teacher", "reward")

    advantages: ImportPath = "hybridengine.drivers.teacher_advantages:distill"
    """Function that computes the advantages of a batch, called as function(rows, across, algorithm, samples)."""
    gamma: Share = 0.0
    """Discount of the log-ratios of later tokens in the advantage of a token; 0 leaves each its own."""
    reward_coef: NonNegative = 0.0
    """Weight of the reward's advantages, which are those of GRPO; 0 leaves the reward to metrics and evaluations."""

    def compared(self, roles: Roles, rollout: Any) -> Any:
        """Return the teacher's log-probs as `ref_log_probs`."""
        return roles.teacher.compute_log_probs(rollout).select_as(**FROM_TEACHER)

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield a weight of rewards that are compared with nothing."""
        yield from super().conflicts(config)
        if self.reward_coef and config.rollout.samples_per_prompt < 2:
            yield Conflict(
                f"algorithm.reward_coef={self.reward_coef:g} compares the responses to a prompt, and"
                f" rollout.samples_per_prompt={config.rollout.samples_per_prompt}; choose at least 2, or reward_coef=0",
                ("algorithm.reward_coef", "rollout.samples_per_prompt"),
            )
