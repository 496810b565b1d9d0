"""PPO's dataflow: one iteration on one screen.

Source: HybridFlow, arXiv 2409.19256, figure 6; algorithm of arXiv 1707.06347 with a KL penalty per token.
"""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.advantages import gae, token_rewards
from hybridengine.algorithms.masking import whiten
from hybridengine.config.algorithm_sections import AlgorithmSection
from hybridengine.drivers.counted import COLUMNS, counted_rows
from hybridengine.drivers.roles import Roles, Sampling, State, function_path
from hybridengine.drivers.step_metrics import measure_rollout, switch_metrics


def step(roles: Roles, sampling: Sampling, settings: AlgorithmSection, state: State) -> dict[str, float]:
    """One iteration; returns its metrics."""
    actor, critic = roles.actor, roles.critic

    prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step).repeat(
        sampling.samples_per_prompt
    )
    to_generate = actor.switch_to_generate()
    rollout = prompts.union(actor.generate_sequences(prompts, sampling.first_seed))
    to_train = actor.switch_to_train()

    batch = rollout.union(
        actor.compute_log_probs(rollout),
        roles.reference.compute_log_probs(rollout),
        critic.compute_values(rollout),
        roles.reward.compute_scores(rollout),
    )
    batch = batch.union(
        roles.compute.map(batch.select(*COLUMNS, "values"), function_path(advantages), settings)
    )
    updates = critic.update(batch), actor.update(batch)
    measured = measure_rollout(roles, batch, settings)

    metrics = measured.get()[0] | switch_metrics(to_generate.get(), to_train.get())
    return metrics | updates[0].get()[0] | updates[1].get()[0]


def advantages(rows: TensorDictBase, across: Across, settings: AlgorithmSection) -> TensorDict:
    """`advantages` and `returns` [B, R]."""
    counted = counted_rows(rows, settings)
    mask = counted.mask_BR
    rewards = token_rewards(counted.scores_B, counted.kl_BR, mask, settings.kl_coef)
    estimates, returns = gae(rewards, rows["values"], mask, settings.gamma, settings.lam)
    if settings.whiten_advantages:
        estimates = whiten(estimates, mask, across=across)
    return counted.columns(advantages=estimates, returns=returns)
