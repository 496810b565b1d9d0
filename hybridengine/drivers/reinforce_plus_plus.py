"""REINFORCE++'s dataflow: no critic and no groups, returns are whitened over the whole batch.

Source: arXiv 2501.03262.
"""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.advantages import reinforce_plus_plus, token_rewards
from hybridengine.config.algorithm_sections import AlgorithmSection
from hybridengine.drivers.counted import COLUMNS, counted_rows
from hybridengine.drivers.roles import Roles, Sampling, State, function_path
from hybridengine.drivers.step_metrics import measure_rollout, switch_metrics


def step(roles: Roles, sampling: Sampling, settings: AlgorithmSection, state: State) -> dict[str, float]:
    """One iteration; returns its metrics."""
    actor = roles.actor

    prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step).repeat(
        sampling.samples_per_prompt
    )
    to_generate = actor.switch_to_generate()
    rollout = prompts.union(actor.generate_sequences(prompts, sampling.first_seed))
    to_train = actor.switch_to_train()

    batch = rollout.union(
        actor.compute_log_probs(rollout),
        roles.reference.compute_log_probs(rollout),
        roles.reward.compute_scores(rollout),
    )
    batch = batch.union(roles.compute.map(batch.select(*COLUMNS), function_path(advantages), settings))
    update = actor.update(batch)
    measured = measure_rollout(roles, batch, settings)

    return measured.get()[0] | switch_metrics(to_generate.get(), to_train.get()) | update.get()[0]


def advantages(rows: TensorDictBase, across: Across, settings: AlgorithmSection) -> TensorDict:
    """`advantages` [B, R]."""
    counted = counted_rows(rows, settings)
    rewards = token_rewards(counted.scores_B, counted.kl_BR, counted.mask_BR, settings.kl_coef)
    return counted.columns(
        advantages=reinforce_plus_plus(rewards, counted.mask_BR, settings.gamma, across=across)
    )
