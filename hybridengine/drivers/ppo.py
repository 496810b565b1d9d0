"""PPO's dataflow: one iteration on one screen.

Source: HybridFlow, arXiv 2409.19256, figure 6; algorithm of arXiv 1707.06347 with a KL penalty per token.
"""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.advantages import gae, token_rewards
from hybridengine.algorithms.kl import kl_estimator
from hybridengine.algorithms.masking import response_mask, whiten, zero_masked
from hybridengine.config.sections import AlgorithmSection
from hybridengine.drivers.roles import Roles, Sampling, function_path
from hybridengine.drivers.step_metrics import STATISTICS, rollout_metrics, switch_metrics

ADVANTAGE_INPUTS = ("response_lengths", "log_probs", "ref_log_probs", "values", "scores")


def ppo_step(roles: Roles, sampling: Sampling, settings: AlgorithmSection) -> dict[str, float]:
    """One iteration; returns its metrics."""
    actor, critic, reference, reward = roles.actor, roles.critic, roles.reference, roles.reward

    prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step).repeat(
        sampling.samples_per_prompt
    )
    to_generate = actor.switch_to_generate()
    rollout = prompts.union(actor.generate_sequences(prompts, sampling.first_seed))
    to_train = actor.switch_to_train()

    batch = rollout.union(
        actor.compute_log_probs(rollout),
        reference.compute_log_probs(rollout),
        critic.compute_values(rollout),
        reward.compute_scores(rollout),
    )
    batch = batch.union(
        roles.compute.map(batch.select(*ADVANTAGE_INPUTS), function_path(advantages), settings)
    )
    updates = critic.update(batch), actor.update(batch)
    measured = roles.compute.measure(batch.select(*STATISTICS), function_path(rollout_metrics), settings)

    metrics = measured.get()[0] | switch_metrics(to_generate.get(), to_train.get())
    return metrics | updates[0].get()[0] | updates[1].get()[0]


def advantages(rows: TensorDictBase, across: Across, settings: AlgorithmSection) -> TensorDict:
    """`advantages` and `returns` [B, R]."""
    mask = response_mask(rows["response_lengths"], rows["log_probs"].size(1))
    kl = zero_masked(kl_estimator(settings.kl_estimator)(rows["log_probs"], rows["ref_log_probs"]), mask)
    rewards = token_rewards(rows["scores"], kl, mask, settings.kl_coef)
    estimates, returns = gae(rewards, rows["values"], mask, settings.gamma, settings.lam)
    if settings.whiten_advantages:
        estimates = whiten(estimates, mask, across=across)
    return TensorDict({"advantages": estimates, "returns": returns}, batch_size=rows.batch_size)
