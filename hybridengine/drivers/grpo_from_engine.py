"""GRPO without a pass for the old policy's log-probs: the engine's are taken, which has drawn the tokens from them.

For one optimizer step per iteration, where the old policy is the present one and the ratio only says how far the engine's
arithmetic is from the trainer's (`actor/ratio_max`). Saves one forward pass of four to five. As in `grpo` otherwise; any
run can name it:

    algorithm: {name: hybridengine.drivers.grpo_from_engine, roles: [actor, reference, reward]}
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.config.algorithm_sections import AlgorithmSection
from hybridengine.drivers.counted import COLUMNS
from hybridengine.drivers.grpo import advantages
from hybridengine.drivers.roles import Roles, Sampling, State, function_path
from hybridengine.drivers.step_metrics import switch_metrics
from hybridengine.errors import DataError
from hybridengine.metrics import keys

SCORED = ("prompt_lengths", "response_lengths", "scores", "dropped")
"""Columns that `scored_metrics` reads."""


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
    measured = roles.compute.measure(batch.select(*SCORED), function_path(scored_metrics))
    update = actor.update(batch)

    return measured.get()[0] | switch_metrics(to_generate.get(), to_train.get()) | update.get()[0]


def scored_metrics(rows: TensorDictBase, across: Across) -> dict[str, float]:
    """Reward and lengths.

    Raises:
        DataError: no response has a score.
    """
    keep = ~rows["dropped"]
    parts = [
        torch.tensor(float(len(rows))),
        keep.sum(),
        rows["scores"][keep].sum(),
        rows["prompt_lengths"].sum(),
        rows["response_lengths"].sum(),
    ]
    num_rows, num_scored, scores, prompts, responses = across.sum(torch.stack(parts).double()).tolist()
    if not num_scored:
        raise DataError(
            f"none of the {int(num_rows)} responses of this step has a score; look at the reward function's failures"
        )
    return {
        keys.REWARD_MEAN: scores / num_scored,
        "rollout/dropped_rows": num_rows - num_scored,
        "rollout/response_tokens_mean": responses / num_rows,
        "rollout/tokens": prompts + responses,
    }
