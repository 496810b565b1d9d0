"""REINFORCE++ (arXiv 2501.03262): returns whitened over the whole batch, without critic or groups."""

from __future__ import annotations

from hybridengine.config.values import ImportPath, NonNegative, Share
from hybridengine.drivers.dataflow import CriticFree


class ReinforcePlusPlus(CriticFree):
    """Advantages are whitened returns."""

    advantages: ImportPath = "hybridengine.drivers.advantages:reinforce_plus_plus"
    """Function that computes the advantages of a batch, called as function(rows, across, algorithm, samples)."""
    gamma: Share = 1.0
    """Discount factor of later rewards."""
    kl_coef: NonNegative = 0.05
    """Weight of the KL penalty on each token's reward."""
