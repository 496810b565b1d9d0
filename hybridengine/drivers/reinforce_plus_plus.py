"""REINFORCE++ (arXiv 2501.03262): returns whitened over the whole batch, without critic or groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridengine.config.algorithm import Conflict
from hybridengine.config.values import ImportPath, Share
from hybridengine.drivers.dataflow import CriticFree
from hybridengine.drivers.kl_penalty import KlPenalty


class ReinforcePlusPlus(KlPenalty, CriticFree):
    """Advantages are whitened returns, on request less the mean of their group."""

    advantages: ImportPath = "hybridengine.drivers.advantages:reinforce_plus_plus"
    """Function that computes the advantages of a batch, called as function(rows, across, algorithm, samples)."""
    gamma: Share = 1.0
    """Discount factor of later rewards."""
    group_baseline: bool = False
    """Subtract the mean of the returns to the same prompt before whitening (REINFORCE++ baseline)."""

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield a group baseline without a group, or with a discount, which it does not read."""
        yield from super().conflicts(config)
        if not self.group_baseline:
            return
        if config.rollout.samples_per_prompt < 2:
            yield Conflict(
                "algorithm.group_baseline=true compares the responses to a prompt, and rollout.samples_per_prompt="
                f"{config.rollout.samples_per_prompt}; choose at least 2",
                ("algorithm.group_baseline", "rollout.samples_per_prompt"),
            )
        if self.gamma != 1:
            yield Conflict(
                f"algorithm.gamma={self.gamma:g} is not read with algorithm.group_baseline=true, whose returns are those"
                " of whole responses; leave one of them out",
                ("algorithm.gamma", "algorithm.group_baseline"),
            )
