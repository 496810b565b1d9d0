"""Rules of how responses are drawn: what restricts them, and what a server leaves to its clients."""

from __future__ import annotations

from collections.abc import Iterator

from hybridengine.config.algorithm import Conflict, ServedAlgorithm
from hybridengine.config.run_config import RunConfig
from hybridengine.config.sections import RolloutSection
from hybridengine.config.structure_checks import structure_conflicts

OF_REQUESTS = ("top_p", "top_k", "min_p", "stop", "structure")
"""Keys of `rollout` that every request to a server has of its own."""


def rollout_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield the violated rules of drawing responses."""
    rollout = config.rollout
    if isinstance(config.algorithm, ServedAlgorithm):
        for name in OF_REQUESTS:
            if (value := getattr(rollout, name)) != RolloutSection.model_fields[name].default:
                yield Conflict(
                    f"rollout.{name}={value} is not read by a server, whose clients choose it for each request; leave it"
                    " out",
                    (f"rollout.{name}",),
                )
    for name in ("top_k", "min_p"):
        if getattr(rollout, name) == 1:
            yield Conflict(
                f"rollout.{name}=1 leaves the most likely token alone to draw, with the probability 1, so that nothing is"
                " trained; choose another value, or leave it out",
                (f"rollout.{name}",),
            )
    if (structure := rollout.structure) is not None:
        yield from structure_conflicts("rollout.structure", structure)
