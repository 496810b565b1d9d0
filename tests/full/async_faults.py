"""Asynchronous GRPO that loses an engine in the middle of a run."""

from __future__ import annotations

import ray

from hybridengine.drivers.async_grpo import AsyncGrpo
from hybridengine.drivers.roles import Roles, Sampling, State


class LosesEngine(AsyncGrpo):
    """Kills the first engine that is left at the begin of a step, while it draws."""

    dies_in: str = "2"
    """Steps in which an engine dies."""

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        if str(sampling.step) in self.dies_in.split():
            ray.kill(roles.generation._engines[0].group.pool._processes[0])
        return super().step(roles, sampling, state)
