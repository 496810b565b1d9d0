"""An asynchronous algorithm for tests, which generates on a pool of its own."""

from __future__ import annotations

from typing import Any

from hybridengine.config.algorithm import Algorithm

NAME = f"{__name__}:AsyncExample"


class AsyncExample(Algorithm):
    """GRPO whose batches are taken from engines that never stop."""

    roles = ("actor", "generation", "reference", "reward")
    min_samples = 2

    def step(self, roles: Any, sampling: Any, state: dict[str, float]) -> dict[str, float]:
        actor, engines = roles.actor, roles.generation
        batch = engines.take(sampling)
        batch = batch.union(
            actor.compute_log_probs(batch),
            roles.reference.compute_log_probs(batch),
            roles.reward.compute_scores(batch),
        )
        batch = batch.union(roles.compute.map(batch, "a.b:c", samples=sampling.samples_per_prompt))
        update = actor.update(batch, self)
        measured = roles.compute.measure(batch, "a.b:c")
        engines.work_until(update, measured)
        engines.update_weights(actor, sampling.step)
        return measured.get()[0] | update.get()[0] | engines.take_metrics()
