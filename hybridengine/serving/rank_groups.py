"""Worker groups of a server, which can be started again."""

from __future__ import annotations

from collections.abc import Sequence

from hybridengine.config import RunConfig
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.rollouts.engine import PoolEngine
from hybridengine.rollouts.pushes import Pushes
from hybridengine.training.launch import RunPools

CLIENT_ACTOR = "workers.client_actor.ClientActor"
CLIENT_ENGINE = "workers.client_engine.ClientEngine"
"""Import paths of the workers; this package never imports them."""


class RankGroups:
    """The actor, engines of the role generation, and the reference if `serve.reference` is set; `start` comes first.

    Args:
        end_tokens: tokens that end a response unless a prompt says otherwise.
    """

    actor: WorkerGroup
    engines: Sequence[PoolEngine]
    """Engines on ranks of their own, new ones after each start; empty without a pool of the role generation."""
    pushes: Pushes
    """Pushes of the actor's weights to the engines."""
    reference: WorkerGroup | None

    def __init__(self, config: RunConfig, end_tokens: tuple[int, ...]) -> None:
        self.config, self.end_tokens = config, end_tokens
        self._pools: RunPools | None = None

    def start(self) -> None:
        """Start new ranks with the base model's weights; earlier ones are ended, whatever they do."""
        self.close()
        self._pools = RunPools(self.config)
        self._pools.start()
        folder = self.config.model_folder
        self.actor = self._pools.start_model(
            "actor", CLIENT_ACTOR, folder=folder, stop_token_ids=self.end_tokens
        )
        engines = self._pools.start_engines(CLIENT_ENGINE)
        self.engines = [PoolEngine(self.config, group, number) for number, group in enumerate(engines)]
        self.pushes = Pushes(self.config, self.actor)
        has_reference = "reference" in self.config.model_roles
        self.reference = self._pools.start_model("reference", folder=folder) if has_reference else None

    def close(self) -> None:
        """End the ranks without waiting for their calls."""
        if self._pools is not None:
            self._pools.close()
            self._pools = None
