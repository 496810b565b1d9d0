"""GRPO without a pass for the old policy's log-probs: those of the engine are taken, which drew the tokens from them.

For one optimizer step per iteration, where the old policy is the present one and the ratio only says how far the engine's
arithmetic is from the trainer's (`actor/ratio_max`). Saves one forward pass of four to five. As in `grpo` otherwise.
"""

from __future__ import annotations

from hybridengine.config.values import ImportPath
from hybridengine.drivers.critic_free import CriticFree


class GrpoFromEngine(CriticFree):
    """GRPO with the engine's log-probs."""

    min_samples = 2
    from_engine = True
    uncorrected = "which takes the engine's log-probs for the trainer's"

    advantages: ImportPath = "hybridengine.drivers.advantages:grpo"
    """Advantages of a batch's responses: a function (rows, across, algorithm, samples)."""
    normalize_std: bool = True
    """Advantages are divided by their group's standard deviation; without it, Dr.GRPO."""
