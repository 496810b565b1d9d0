"""Online DPO: the best and the worst response to a prompt, as scored by the reward, form a preference.

Source: arXiv 2402.04792, algorithm 1 (the judge is the run's reward); loss of arXiv 2305.18290, equation 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybridengine.config.algorithm import Algorithm, Conflict
from hybridengine.config.loss_sections import PREFERENCE_LOSS
from hybridengine.config.values import ImportPath, Positive, Smoothing
from hybridengine.drivers.dataflow import measure_rollout, switch_metrics
from hybridengine.drivers.roles import Roles, Sampling, State


class OnlineDpo(Algorithm):
    """Increases the likelihood of the better response of each pair over the worse one, without advantages."""

    roles = ("actor", "reference", "reward")
    min_samples = 2
    rows_per_unit = 2
    uncorrected = "which weighs no tokens"
    reads_overlong = False

    loss: ImportPath = PREFERENCE_LOSS
    """Loss of pairs of rows, called as function(log_probs, columns, algorithm, actor, aggregation)."""
    beta: Positive = 0.1
    """Strength of the regularisation towards the reference."""
    label_smoothing: Smoothing = 0.0
    """Assumed fraction of wrong preferences."""

    def step(self, roles: Roles, sampling: Sampling, state: State) -> dict[str, float]:
        """Run one iteration; return its metrics."""
        actor, samples = roles.actor, sampling.samples_per_prompt

        prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step).repeat(samples)
        to_generate = actor.switch_to_generate()
        rollout = prompts.union(actor.generate_sequences(prompts, sampling.first_seed))
        to_train = actor.switch_to_train()

        batch = rollout.union(
            actor.compute_log_probs(rollout),
            roles.reference.compute_log_probs(rollout),
            roles.reward.compute_scores(rollout),
        )
        judged = batch.get("scores", "dropped")
        pairs = batch[preferences(judged["scores"].tolist(), judged["dropped"].tolist(), samples)]
        update = actor.update_preferences(pairs, self)
        measured = measure_rollout(roles, batch, self)

        return measured.get()[0] | switch_metrics(to_generate.get(), to_train.get()) | update.get()[0]

    def conflicts(self, config: Any) -> Iterator[Conflict]:
        """Yield a conflict if the pairs do not split evenly."""
        yield from pair_conflicts(self.name, config)


def pair_conflicts(name: str, config: Any) -> Iterator[Conflict]:
    """Yield a conflict if the pairs of an iteration do not split evenly over replicas and mini-batches."""
    replicas, mini_batches = config.actor.parallel.dp_size, config.actor.mini_batches
    if config.data.batch_size % (replicas * mini_batches):
        yield Conflict(
            f"data.batch_size={config.data.batch_size} pairs of algorithm.name={name} must split evenly over"
            f" actor.mini_batches={mini_batches} and the d = {replicas} replicas of actor.parallel="
            f"{config.actor.parallel}; choose a multiple of {replicas * mini_batches}",
            ("data.batch_size", "actor.parallel", "actor.mini_batches"),
        )


def preferences(scores: Sequence[float], dropped: Sequence[bool], samples: int) -> list[int]:
    """Return the row numbers of the best and the worst response to each prompt, in turn; of equal ones the first.

    A response without a score is only chosen if there are no others.
    """
    pairs = []
    for first in range(0, len(scores), samples):
        judged = [row for row in range(first, first + samples) if not dropped[row]] or [first]
        pairs += [max(judged, key=lambda row: scores[row]), min(judged, key=lambda row: scores[row])]
    return pairs
