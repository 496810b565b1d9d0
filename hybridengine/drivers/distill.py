"""On-policy distillation: the actor draws responses, and a frozen teacher judges every token of them.

A token's reward is the teacher's log-prob less the actor's, whose expectation over the actor's draws is minus the reverse
KL divergence. Without a discount of its own a token answers for itself alone.

Source: Thinking Machines Lab, "On-Policy Distillation", 2025; with `gamma` 1 it is the policy gradient of MiniLLM,
arXiv 2306.08543, section 2.2. GKD, arXiv 2306.13649, has the same objective for its own samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hybridengine.config import holder_shape, model_holders
from hybridengine.config.algorithm import Conflict
from hybridengine.config.values import CountOrZero, ImportPath, NonNegative, Share
from hybridengine.drivers.dataflow import CriticFree
from hybridengine.drivers.roles import Roles
from hybridengine.errors import CheckpointError, ConfigError
from hybridengine.models.shapes import ModelShape

FROM_TEACHER = {"ref_log_probs": "teacher_log_probs"}
"""Renames the teacher's column: the KL divergence is measured from it."""


class Distill(CriticFree):
    """Advantages are minus the reverse KL divergence from a teacher, on request with those of the reward."""

    roles = ("actor", "teacher", "reward")

    advantages: ImportPath = "hybridengine.drivers.teacher_advantages:distill"
    """Function that computes the advantages of a batch, called as function(rows, across, algorithm, samples)."""
    gamma: Share = 0.0
    """Discount of the log-ratios of later tokens in the advantage of a token; 0 leaves each its own."""
    top_k: CountOrZero = 0
    """Number of the teacher's most likely tokens among which distributions are compared, as a loss beside that of the
    advantages; 0 compares the drawn token alone, by its advantage."""
    reward_coef: NonNegative = 0.0
    """Weight of the reward's advantages, which are those of GRPO; 0 leaves the reward to metrics and evaluations."""

    def compared(self, roles: Roles, rollout: Any) -> Any:
        """Return the teacher's log-probs as `ref_log_probs`, and with `top_k` those of its most likely tokens."""
        rows = roles.teacher.compute_log_probs(rollout, self.top_k)
        return rows.union(rows.select_as(**FROM_TEACHER))

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield options that nothing reads, and a weight of rewards that are compared with nothing."""
        yield from super().conflicts(config)
        if self.reward_coef and config.rollout.samples_per_prompt < 2:
            yield Conflict(
                f"algorithm.reward_coef={self.reward_coef:g} compares the responses to a prompt, and"
                f" rollout.samples_per_prompt={config.rollout.samples_per_prompt}; choose at least 2, or reward_coef=0",
                ("algorithm.reward_coef", "rollout.samples_per_prompt"),
            )
        if self.overlong is not None and self.overlong.cache_tokens and not self.reward_coef:
            yield Conflict(
                f"algorithm.overlong.cache_tokens={self.overlong.cache_tokens} lowers scores, which are not trained with"
                " algorithm.reward_coef=0; give reward_coef, or leave it out",
                ("algorithm.overlong.cache_tokens", "algorithm.reward_coef"),
            )
        if self.top_k and self.gamma:
            yield Conflict(
                f"algorithm.gamma={self.gamma:g} is not read with algorithm.top_k={self.top_k}, whose loss is that of"
                " single tokens; leave one of them out",
                ("algorithm.gamma", "algorithm.top_k"),
            )
        with suppress(ConfigError, CheckpointError):  # found with the models
            smallest = min(shape.vocab_size for shape in _shapes(config))
            if self.top_k > smallest:
                yield Conflict(
                    f"algorithm.top_k={self.top_k} must be at most the {smallest} tokens of the smaller vocabulary; lower"
                    " it",
                    ("algorithm.top_k", "model", "teacher.path"),
                )


def _shapes(config: Any) -> list[ModelShape]:
    """Return the shapes of actor and teacher."""
    return [holder_shape(config, one) for one in model_holders(config) if one.role in ("actor", "teacher")]
