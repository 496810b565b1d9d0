"""Asynchronous PPO: engines on ranks of their own generate all the time, while actor and critic train what has ended."""

from __future__ import annotations

from hybridengine.drivers.dataflow import measure_rollout, metrics_of, with_advantages
from hybridengine.drivers.ppo import Ppo
from hybridengine.drivers.roles import Roles, Sampling, State


class AsyncPpo(Ppo):
    """PPO on responses whose tokens are at most `staleness.max_versions` versions older than the weights they train.

    With `correction.name=token_tis`, it is decoupled PPO (arXiv 2505.24298, section 5.2) with a cap.
    """

    roles = ("actor", "generation", "critic", "reference", "reward")

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """Run one iteration; return its metrics."""
        actor, critic, engines, version = roles.actor, roles.critic, roles.generation, sampling.step - 1

        batch, scores = engines.take(version, roles.reward)
        batch = batch.union(
            actor.compute_log_probs(batch),
            roles.reference.compute_log_probs(batch),
            critic.compute_values(batch),
            scores,
        )
        columns = ["values", "fresh"]
        samples, seed = sampling.samples_per_prompt, sampling.first_seed
        present = self.present(state, sampling)
        batch = with_advantages(roles, batch, present, samples, columns=columns, seed=seed)
        updates = [critic.update(batch, version)]
        if not self.pretrains(sampling):
            updates += [actor.update(batch, self, version)]
        measured = measure_rollout(roles, batch, self, version=version, max_versions=engines.max_versions)
        engines.work_until(*updates, measured)
        engines.update_weights(sampling.step)

        metrics = measured.get()[0] | engines.take_metrics()
        return metrics | self.adapted(state, sampling, metrics) | metrics_of(updates)
