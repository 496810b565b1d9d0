"""GRPO without a pass for the old policy's log-probs: the engine's are taken, which has drawn the tokens from them.

For one optimizer step per iteration, where the old policy is the present one and the ratio only says how far the engine's
arithmetic is from the trainer's (`actor/ratio_max`). Saves one forward pass of four to five. As in `grpo` otherwise.
"""

from __future__ import annotations

from hybridengine.config.algorithm_sections import AlgorithmSection
from hybridengine.drivers.counted import COLUMNS
from hybridengine.drivers.grpo import advantages
from hybridengine.drivers.roles import Roles, Sampling, State, function_path
from hybridengine.drivers.step_metrics import measure_rollout, switch_metrics


def step(roles: Roles, sampling: Sampling, settings: AlgorithmSection, state: State) -> dict[str, float]:
    """One iteration; returns its metrics."""
    actor, samples = roles.actor, sampling.samples_per_prompt

    prompts = roles.prompts.training_prompts(sampling.prompts, sampling.step).repeat(samples)
    to_generate = actor.switch_to_generate()
    rollout = prompts.union(actor.generate_sequences(prompts, sampling.first_seed))
    to_train = actor.switch_to_train()

    batch = rollout.union(
        rollout.select_as(log_probs="rollout_log_probs"),
        roles.reference.compute_log_probs(rollout),
        roles.reward.compute_scores(rollout),
    )
    batch = batch.union(
        roles.compute.map(batch.select(*COLUMNS), function_path(advantages), settings, samples)
    )
    update = actor.update(batch)
    measured = measure_rollout(roles, batch, settings, from_engine=True)

    return measured.get()[0] | switch_metrics(to_generate.get(), to_train.get()) | update.get()[0]
