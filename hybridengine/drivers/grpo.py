"""GRPO, and Dr.GRPO: a response is compared with the others to the same prompt.

Source: DeepSeekMath, arXiv 2402.03300, section 4.1; Dr.GRPO, arXiv 2503.20783, section 3
(`algorithm.normalize_std=false`, `actor.loss_aggregation=sequence_sum`, as in `configs/dr-grpo.yaml`).
"""

from __future__ import annotations

from hybridengine.config.values import ImportPath
from hybridengine.drivers.critic_free import CriticFree


class Grpo(CriticFree):
    """Advantages are scores less their group's mean."""

    min_samples = 2

    advantages: ImportPath = "hybridengine.drivers.advantages:grpo"
    """Advantages of a batch's responses: a function (rows, across, algorithm, samples)."""
    normalize_std: bool = True
    """Advantages are divided by their group's standard deviation; without it, Dr.GRPO."""


class GrpoFromEngine(Grpo):
    """GRPO without a pass for the old policy's log-probs: it takes those with which the engine drew the tokens.

    For one optimizer step per iteration, where the old policy is the present one and the ratio only says how far the
    engine's arithmetic is from the trainer's (`actor/ratio_max`). Saves one forward pass of four to five.
    """

    from_engine = True
    uncorrected = "which takes the engine's log-probs for the trainer's"
