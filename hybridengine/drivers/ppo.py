"""PPO's dataflow: one iteration on one screen.

Source: HybridFlow, arXiv 2409.19256, figure 6; algorithm of arXiv 1707.06347 with a KL penalty per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDict

from hybridengine.algorithms.advantages import gae, token_rewards
from hybridengine.algorithms.kl import kl_estimator
from hybridengine.algorithms.masking import response_mask, whiten, zero_masked
from hybridengine.config.sections import AlgorithmSection
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.drivers.step_metrics import rollout_metrics, switch_metrics
from hybridengine.metrics.keys import time_key


@dataclass(frozen=True)
class PpoRoles:
    """The four models of PPO."""

    actor: WorkerGroup
    critic: WorkerGroup
    reference: WorkerGroup
    reward: WorkerGroup


def ppo_step(roles: PpoRoles, prompts: TensorDict, settings: AlgorithmSection) -> dict[str, float]:
    """One iteration over `prompts` (with `seeds` [B]); returns its metrics."""
    actor, critic, reference, reward = roles.actor, roles.critic, roles.reference, roles.reward

    to_generate = actor.switch_to_generate()
    rollout = actor.generate_sequences(prompts)
    to_train = actor.switch_to_train()

    log_probs = actor.compute_log_probs(rollout)
    ref_log_probs = reference.compute_log_probs(rollout)
    values = critic.compute_values(rollout)
    scores = reward.compute_scores(rollout)

    batch = rollout.get()
    for columns in (log_probs, ref_log_probs, values, scores):
        batch.update(columns.get())
    mask = response_mask(batch["response_lengths"], batch["log_probs"].size(1))
    kl = zero_masked(kl_estimator(settings.kl_estimator)(batch["log_probs"], batch["ref_log_probs"]), mask)
    rewards = token_rewards(batch["scores"], kl, mask, settings.kl_coef)
    advantages, batch["returns"] = gae(rewards, batch["values"], mask, settings.gamma, settings.lam)
    batch["advantages"] = whiten(advantages, mask) if settings.whiten_advantages else advantages

    critic_update = critic.update(batch)
    actor_update = actor.update(batch)

    phases = {
        "generate": rollout,
        "switch_to_generate": to_generate,
        "switch_to_train": to_train,
        "log_probs": log_probs,
        "ref_log_probs": ref_log_probs,
        "values": values,
        "scores": scores,
        "update_critic": critic_update,
        "update_actor": actor_update,
    }
    metrics = rollout_metrics(batch, kl, mask) | switch_metrics(to_generate.get(), to_train.get())
    metrics |= critic_update.get()[0] | actor_update.get()[0]
    return metrics | {time_key(phase): future.seconds for phase, future in phases.items()}
