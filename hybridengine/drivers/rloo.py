"""RLOO: the baseline of a response is the mean of the others to the same prompt.

Source: arXiv 2402.14740, sections 2 and 3; the KL penalty is part of a response's reward.
"""

from __future__ import annotations

from hybridengine.config.values import ImportPath
from hybridengine.drivers.dataflow import CriticFree
from hybridengine.drivers.kl_penalty import KlPenalty


class Rloo(KlPenalty, CriticFree):
    """Advantages are returns minus the mean of the group's other returns."""

    min_samples = 2

    advantages: ImportPath = "hybridengine.drivers.advantages:rloo"
    """Function that computes the advantages of a batch, called as function(rows, across, algorithm, samples)."""
