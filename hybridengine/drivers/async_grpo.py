"""Asynchronous GRPO: engines on ranks of their own generate all the time, while the actor trains what has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridengine.config.algorithm import Conflict
from hybridengine.drivers.dataflow import measure_rollout, with_advantages
from hybridengine.drivers.grpo import Grpo
from hybridengine.drivers.roles import Roles, Sampling, State


class AsyncGrpo(Grpo):
    """GRPO on responses whose tokens are at most `staleness.max_versions` versions older than the weights they train."""

    roles = ("actor", "generation", "reference", "reward")

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield rounds, which an asynchronous batch does not have."""
        yield from super().conflicts(config)
        if self.max_rounds > 1:
            yield Conflict(
                f"algorithm.max_rounds={self.max_rounds} is not read by algorithm.name={self.name}, whose engines draw"
                " all the time; set generation.max_tries",
                ("algorithm.max_rounds", "algorithm.name"),
            )

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """Run one iteration; return its metrics."""
        actor, engines, version = roles.actor, roles.generation, sampling.step - 1

        batch, scores = engines.take(version, roles.reward)
        batch = batch.union(
            actor.compute_log_probs(batch, self.needs_squares),
            roles.reference.compute_log_probs(batch),
            scores,
        )
        samples, columns = sampling.samples_per_prompt, ["fresh", *self.more_columns]
        batch = with_advantages(roles, batch, self, samples, columns=columns, seed=sampling.first_seed)
        update = actor.update(batch, self, version)
        measured = measure_rollout(roles, batch, self, version=version, max_versions=engines.max_versions)
        engines.work_until(update, measured)
        engines.update_weights(sampling.step)

        return measured.get()[0] | update.get()[0] | engines.take_metrics()
