"""Safe-RLHF (PPO-Lagrangian): maximises rewards while keeping the mean cost below a limit.

Maximise J_r subject to J_c <= d, through min over the policy, max over lam >= 0, of -J_r + lam·(J_c - d).

Source: arXiv 2310.12773, section 3.3 and appendix B.3.
"""

from __future__ import annotations

import math

from hybridengine.config.values import ImportPath, NonNegative, Positive
from hybridengine.drivers.dataflow import measure_rollout, metrics_of, switch_metrics, with_advantages
from hybridengine.drivers.ppo import Ppo
from hybridengine.drivers.roles import Roles, Sampling, State
from hybridengine.errors import DataError

COSTS = {"cost_scores": "scores", "cost_dropped": "dropped"}
COST_VALUES = {"cost_values": "values"}
MEAN_COST = "hybridengine.drivers.advantages:mean_cost"


class SafeRlhf(Ppo):
    """PPO with a cost critic, whose advantages are weighted by a Lagrange multiplier."""

    roles = ("actor", "critic", "cost_critic", "reference", "reward", "cost")
    advantage_parameters = (*Ppo.advantage_parameters, "multiplier")

    advantages: ImportPath = "hybridengine.drivers.advantages:safe_rlhf"
    """Function that computes advantages, returns and cost returns of a batch, called as function(rows, across,
    algorithm, samples, multiplier)."""
    cost_limit: float = 0.0
    """Largest mean cost of a response."""
    multiplier_lr: Positive = 0.1
    """Learning rate of the logarithm of the Lagrange multiplier."""
    max_log_multiplier: NonNegative = 5.0
    """Upper bound of the multiplier's logarithm, so that an unreachable cost limit does not suppress the reward."""

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """Run one iteration; return its metrics. `state` holds the logarithm of the Lagrange multiplier."""
        actor, critic, cost_critic = roles.actor, roles.critic, roles.cost_critic
        samples = sampling.samples_per_prompt

        prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step).repeat(samples)
        to_generate = actor.switch_to_generate()
        rollout = prompts.union(actor.generate_sequences(prompts, sampling.first_seed))
        to_train = actor.switch_to_train()

        costs = roles.cost.compute_scores(rollout)
        batch = rollout.union(
            actor.compute_log_probs(rollout),
            roles.reference.compute_log_probs(rollout),
            critic.compute_values(rollout),
            cost_critic.compute_values(rollout).select_as(**COST_VALUES),
            roles.reward.compute_scores(rollout),
            costs.select_as(**COSTS),
            costs.select(*roles.cost.term_columns),
        )
        measured_costs = roles.compute.measure(batch.select(*COSTS), MEAN_COST).get()[0]
        logarithm = state.get("log_multiplier", 0.0)
        if not self.pretrains(sampling):
            logarithm = self.updated_log_multiplier(logarithm, measured_costs["cost/mean"])
        state["log_multiplier"], multiplier = logarithm, math.exp(logarithm)

        columns = ["values", *COSTS, *COST_VALUES]
        batch = with_advantages(
            roles,
            batch,
            self.present(state, sampling),
            samples,
            multiplier,
            columns=columns,
            seed=sampling.first_seed,
        )
        for_costs = batch.union(batch.select_as(values="cost_values", returns="cost_returns"))
        updates = [critic.update(batch), cost_critic.update(for_costs)]
        if not self.pretrains(sampling):
            updates += [actor.update(batch, self)]
        measured = measure_rollout(roles, batch, self)

        metrics = measured.get()[0] | switch_metrics(to_generate.get(), to_train.get())
        metrics |= measured_costs | {"cost/multiplier": multiplier} | self.adapted(state, sampling, metrics)
        return metrics | metrics_of(updates)

    def updated_log_multiplier(self, log_multiplier: float, mean_cost: float) -> float:
        """Return log lam after one SGD step on -(J_c - d)·lam, whose derivative with respect to log lam is itself.

        `mean_cost` is J_c, the mean over the batch's responses on all ranks; raises DataError if it is not finite.

        Source: arXiv 2310.12773, equation 31 (where J_c is measured from the limit).
        """
        if not math.isfinite(mean_cost):
            raise DataError(
                f"mean_cost={mean_cost} must be a finite number; look for failed rows of the cost model"
            )
        change = self.multiplier_lr * (mean_cost - self.cost_limit) * math.exp(log_multiplier)
        return min(log_multiplier + change, self.max_log_multiplier)
