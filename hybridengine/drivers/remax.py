"""ReMax's dataflow: the baseline of a response is the reward of the greedy one to the same prompt.

Source: arXiv 2310.10505, algorithm 1; with a KL penalty per token as in PPO.
"""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.advantages import remax, token_rewards
from hybridengine.config.algorithm_sections import AlgorithmSection
from hybridengine.drivers.counted import COLUMNS, counted_rows
from hybridengine.drivers.roles import Roles, Sampling, State, function_path
from hybridengine.drivers.step_metrics import measure_rollout, switch_metrics

BASELINE = {"baseline_scores": "scores", "baseline_dropped": "dropped"}


def step(roles: Roles, sampling: Sampling, settings: AlgorithmSection, state: State) -> dict[str, float]:
    """One iteration; returns its metrics."""
    actor, reward = roles.actor, roles.reward

    asked = roles.prompts.training_prompts(sampling.prompts, sampling.step)
    prompts = asked.repeat(sampling.samples_per_prompt)
    to_generate = actor.switch_to_generate()
    rollout = prompts.union(actor.generate_sequences(prompts, sampling.first_seed))
    greedy = asked.union(actor.generate_sequences(asked, greedy=True))
    to_train = actor.switch_to_train()

    batch = rollout.union(
        actor.compute_log_probs(rollout),
        roles.reference.compute_log_probs(rollout),
        reward.compute_scores(rollout),
        reward.compute_scores(greedy).select_as(**BASELINE).repeat(sampling.samples_per_prompt),
    )
    batch = batch.union(
        roles.compute.map(batch.select(*COLUMNS, *BASELINE), function_path(advantages), settings)
    )
    update = actor.update(batch)
    measured = measure_rollout(roles, batch, settings)

    return measured.get()[0] | switch_metrics(to_generate.get(), to_train.get()) | update.get()[0]


def advantages(rows: TensorDictBase, across: Across, settings: AlgorithmSection) -> TensorDict:
    """`advantages` [B, R]; a row whose baseline has no score counts as little as one without a score of its own."""
    rows["dropped"] = rows["dropped"] | rows["baseline_dropped"]
    counted = counted_rows(rows, settings)
    rewards = token_rewards(counted.scores_B, counted.kl_BR, counted.mask_BR, settings.kl_coef)
    return counted.columns(advantages=remax(rewards, counted.mask_BR, rows["baseline_scores"]))
