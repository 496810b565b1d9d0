"""The critic-free dataflow shared by GRPO, RLOO and REINFORCE++, which differ only in their advantages."""

from __future__ import annotations

from typing import ClassVar

from hybridengine.config.algorithm import Algorithm
from hybridengine.config.values import ImportPath
from hybridengine.drivers.dataflow import measure_rollout, switch_metrics, with_advantages
from hybridengine.drivers.roles import Roles, Sampling, State


class CriticFree(Algorithm):
    """Base of algorithms whose advantages are computed from a batch's scores alone."""

    roles = ("actor", "reference", "reward")
    from_engine: ClassVar[bool] = False
    """True if the engine's log-probs replace those of the old policy, which are then not computed."""

    advantages: ImportPath
    """Function that computes the advantages of a batch, called as function(rows, across, algorithm, samples)."""

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """Run one iteration; return its metrics."""
        actor, samples = roles.actor, sampling.samples_per_prompt

        prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step).repeat(samples)
        to_generate = actor.switch_to_generate()
        rollout = prompts.union(actor.generate_sequences(prompts, sampling.first_seed))
        to_train = actor.switch_to_train()

        batch = rollout.union(
            rollout.select_as(log_probs="rollout_log_probs")
            if self.from_engine
            else actor.compute_log_probs(rollout),
            roles.reference.compute_log_probs(rollout),
            roles.reward.compute_scores(rollout),
        )
        batch = with_advantages(roles, batch, self, samples)
        update = actor.update(batch, self)
        measured = measure_rollout(roles, batch, self, from_engine=self.from_engine)

        return measured.get()[0] | switch_metrics(to_generate.get(), to_train.get()) | update.get()[0]
