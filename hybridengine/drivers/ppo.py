"""PPO (arXiv 1707.06347) with a KL penalty per token, as a dataflow (HybridFlow, arXiv 2409.19256, figure 6)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from hybridengine.config.algorithm import Conflict
from hybridengine.config.values import CountOrZero, ImportPath, Positive, Share
from hybridengine.drivers.dataflow import measure_rollout, metrics_of, switch_metrics, with_advantages
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
    critic_warmup: CountOrZero = 0
    """Number of iterations before the actor's first update, which train critics alone, towards returns with a lambda of
    1 (VAPO's value pretraining)."""
    whiten_advantages: bool = True
    """Normalise advantages to mean 0 and variance 1 over the valid tokens."""

    @property
    def needs_on_policy(self) -> str | None:
        """Reason why rows must be on-policy without a correction."""
        if self.correction is not None:
            return None
        return "returns and clipped ratios take the weights that drew the rows for the current ones"

    def first_update(self, role: str) -> int:
        """Return the number of the first iteration that updates a role: the actor waits for its critics."""
        return 1 + self.critic_warmup if role == "actor" else 1

    def traced(self) -> Self:
        """Return the algorithm without iterations for critics alone."""
        return self.model_copy(update={"critic_warmup": 0})

    def pretrains(self, sampling: Sampling) -> bool:
        """Return True for an iteration that trains critics alone.

        Source: VAPO, arXiv 2504.05118, section 4.1; VC-PPO, arXiv 2503.01491 (value pretraining).
        """
        return sampling.step < self.first_update("actor")

    def present(self, state: State, sampling: Sampling) -> Self:
        """Return the algorithm of an iteration: with the present weight of its KL penalty, and Monte-Carlo returns while
        critics are trained alone."""
        present = self.penalised(state)
        return present.model_copy(update={"critic_lam": 1.0}) if self.pretrains(sampling) else present

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
            roles, batch, self.present(state, sampling), samples, columns=["values"], seed=sampling.first_seed
        )
        updates = [critic.update(batch)]
        if not self.pretrains(sampling):
            updates += [actor.update(batch, self)]
        measured = measure_rollout(roles, batch, self)

        metrics = measured.get()[0] | switch_metrics(to_generate.get(), to_train.get())
        return metrics | self.adapted(state, sampling, metrics) | metrics_of(updates)

    def adapted(self, state: State, sampling: Sampling, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt the weight of the KL penalty, but for iterations that leave the actor as it is; return metrics of it."""
        return {} if self.pretrains(sampling) else self.adapt(state, metrics)

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield a lambda that nothing reads, and an actor that is never updated."""
        yield from super().conflicts(config)
        if self.critic_warmup >= config.run.steps:
            yield Conflict(
                f"algorithm.critic_warmup={self.critic_warmup} must be fewer than run.steps={config.run.steps};"
                f" choose at most {config.run.steps - 1}, or raise run.steps",
                ("algorithm.critic_warmup", "run.steps"),
            )
        replaced = self.lam_alpha is not None and self.critic_lam is not None
        if replaced and self.lam != type(self).model_fields["lam"].default:
            yield Conflict(
                f"algorithm.lam={self.lam:g} is not read: lam_alpha gives the lambda of the advantages, and critic_lam"
                " that of the critic's returns; leave one of them out",
                ("algorithm.lam", "algorithm.lam_alpha", "algorithm.critic_lam"),
            )
