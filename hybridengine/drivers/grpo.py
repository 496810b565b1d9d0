"""GRPO, and Dr.GRPO: each response is compared with the others to the same prompt.

Source: DeepSeekMath, arXiv 2402.03300, section 4.1; Dr.GRPO, arXiv 2503.20783, section 3
(`algorithm.normalize_std=false`, `actor.loss_aggregation=sequence_sum`, as in `configs/dr-grpo.yaml`).
"""

from __future__ import annotations

from hybridengine.config.values import ImportPath
from hybridengine.drivers.dataflow import CriticFree


class Grpo(CriticFree):
    """Advantages are scores minus the mean of their group."""

    min_samples = 2

    advantages: ImportPath = "hybridengine.drivers.advantages:grpo"
    """Function that computes the advantages of a batch, called as function(rows, across, algorithm, samples)."""
    normalize_std: bool = True
    """Divide advantages by their group's standard deviation; False for Dr.GRPO."""


class GrpoFromEngine(Grpo):
    """GRPO with the engine's log-probs as those of the old policy, which saves one forward pass of four to five.

    For one optimizer step per iteration, where the old policy is the current one and the ratio only measures the
    numerical difference between engine and trainer (`actor/ratio_max`).
    """

    from_engine = True
    uncorrected = "which takes the engine's log-probs for the trainer's"
