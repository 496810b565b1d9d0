"""ReMax: the baseline of a response is the reward of the greedy response to the same prompt.

Source: arXiv 2310.10505, algorithm 1; with a KL penalty per token as in PPO.
"""

from __future__ import annotations

from hybridengine.config.values import ImportPath
from hybridengine.drivers.dataflow import measure_rollout, switch_metrics, with_advantages
from hybridengine.drivers.kl_penalty import KlPenalty
from hybridengine.drivers.roles import Roles, Sampling, State

BASELINE = {"baseline_scores": "scores", "baseline_dropped": "dropped"}


class Remax(KlPenalty):
    """Advantages are returns minus the greedy response's reward."""

    roles = ("actor", "reference", "reward")

    advantages: ImportPath = "hybridengine.drivers.advantages:remax"
    """Function that computes the advantages of a batch, called as function(rows, across, algorithm, samples)."""

    @property
    def needs_on_policy(self) -> str:
        """Reason why rows must be on-policy."""
        return "the baseline is the reward of the greedy response of the same weights"

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """Run one iteration; return its metrics."""
        actor, reward, samples = roles.actor, roles.reward, sampling.samples_per_prompt

        asked = roles.prompts.training_prompts(sampling.prompts, sampling.step)
        prompts = asked.repeat(samples)
        to_generate = actor.switch_to_generate()
        rollout = prompts.union(actor.generate_sequences(prompts, sampling.first_seed))
        greedy = asked.union(actor.generate_sequences(asked, greedy=True))
        to_train = actor.switch_to_train()

        batch = rollout.union(
            actor.compute_log_probs(rollout),
            roles.reference.compute_log_probs(rollout),
            reward.compute_scores(rollout),
            reward.compute_scores(greedy).select_as(**BASELINE).repeat(samples),
        )
        batch = with_advantages(
            roles, batch, self.penalised(state), samples, columns=[*BASELINE], seed=sampling.first_seed
        )
        update = actor.update(batch, self)
        measured = measure_rollout(roles, batch, self)

        metrics = measured.get()[0] | switch_metrics(to_generate.get(), to_train.get()) | update.get()[0]
        return metrics | self.adapt(state, metrics)

    def scored_rows(self, num_prompts: int, num_rows: int) -> int:
        """Return the rows of the smallest call that scores responses: one greedy response per prompt."""
        return num_prompts
