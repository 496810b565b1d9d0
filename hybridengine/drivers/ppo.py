"""PPO (arXiv 1707.06347) with a KL penalty per token, as a dataflow (HybridFlow, arXiv 2409.19256, figure 6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridengine.config.algorithm import Conflict
from hybridengine.config.values import ImportPath, Positive, Share
from hybridengine.drivers.dataflow import measure_rollout, switch_metrics, with_advantages
from hybridengine.drivers.kl_penalty import KlPenalty
from hybridengine.drivers.roles import Roles, Sampling, State


class Ppo(KlPenalty):
    """Advantages are estimated from a critic's values."""

    roles = ("actor", "critic", "reference", "reward")

    advantages: ImportPath = "hybridengine.drivers.advantages:ppo"
    """Function that computes advantages and returns of a batch, called as function(rows, across, algorithm, samples)."""
    gamma: Share = 1.0
    """Discount factor of later rewards."""
    lam: Share = 0.95
    """Lambda of generalised advantage estimation."""
    critic_lam: Share | None = None
    """Lambda of the returns that critics are trained towards; by default `lam`. VAPO: 1."""
    lam_alpha: Positive | None = None
    """Alpha of length-adaptive advantages, whose lambda is 1 - 1/(alpha·length of the response); by default `lam` holds
    for all. VAPO: 0.05."""
    whiten_advantages: bool = True
    """Normalise advantages to mean 0 and variance 1 over the valid tokens."""

    @property
    def needs_on_policy(self) -> str | None:
        """Reason why rows must be on-policy without a correction."""
        if self.correction is not None:
            return None
        return "returns and clipped ratios take the weights that drew the rows for the current ones"

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """Run one iteration; return its metrics."""
        actor, critic, samples = roles.actor, roles.critic, sampling.samples_per_prompt

        prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step).repeat(samples)
        to_generate = actor.switch_to_generate()
        rollout = prompts.union(actor.generate_sequences(prompts, sampling.first_seed))
        to_train = actor.switch_to_train()

        batch = rollout.union(
            actor.compute_log_probs(rollout),
            roles.reference.compute_log_probs(rollout),
            critic.compute_values(rollout),
            roles.reward.compute_scores(rollout),
        )
        batch = with_advantages(
            roles, batch, self.penalised(state), samples, columns=["values"], seed=sampling.first_seed
        )
        updates = critic.update(batch), actor.update(batch, self)
        measured = measure_rollout(roles, batch, self)

        metrics = measured.get()[0] | switch_metrics(to_generate.get(), to_train.get())
        metrics |= self.adapt(state, metrics)
        return metrics | updates[0].get()[0] | updates[1].get()[0]

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield a lambda that nothing reads."""
        yield from super().conflicts(config)
        replaced = self.lam_alpha is not None and self.critic_lam is not None
        if replaced and self.lam != type(self).model_fields["lam"].default:
            yield Conflict(
                f"algorithm.lam={self.lam:g} is not read: lam_alpha gives the lambda of the advantages, and critic_lam"
                " that of the critic's returns; leave one of them out",
                ("algorithm.lam", "algorithm.lam_alpha", "algorithm.critic_lam"),
            )
