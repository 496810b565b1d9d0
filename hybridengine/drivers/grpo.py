"""GRPO's dataflow, and Dr.GRPO's: no critic, a response is compared with the others to the same prompt.

Source: DeepSeekMath, arXiv 2402.03300, section 4.1; Dr.GRPO, arXiv 2503.20783, section 3
(`algorithm.normalize_std=false`, `actor.loss_aggregation=sequence_sum`, as in `configs/dr-grpo.yaml`).
"""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.advantages import dr_grpo, grpo
from hybridengine.algorithms.masking import over_tokens
from hybridengine.config.algorithm_sections import AlgorithmSection
from hybridengine.drivers.counted import COLUMNS, counted_rows
from hybridengine.drivers.roles import Roles, Sampling, State, function_path
from hybridengine.drivers.step_metrics import measure_rollout, switch_metrics
from hybridengine.runtime.row_requests import ROW_NUMBERS


def step(roles: Roles, sampling: Sampling, settings: AlgorithmSection, state: State) -> dict[str, float]:
    """One iteration; returns its metrics."""
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
    batch = batch.union(
        roles.compute.map(batch.select(*COLUMNS), function_path(advantages), settings, samples)
    )
    update = actor.update(batch)
    measured = measure_rollout(roles, batch, settings)

    return measured.get()[0] | switch_metrics(to_generate.get(), to_train.get()) | update.get()[0]


def advantages(rows: TensorDictBase, across: Across, settings: AlgorithmSection, samples: int) -> TensorDict:
    """`advantages` [B, R]: one for each response, at all of its tokens."""
    counted, estimate = counted_rows(rows, settings), grpo if settings.normalize_std else dr_grpo
    estimates = estimate(counted.scores_B, rows[ROW_NUMBERS] // samples, counted.keep_B, across)
    return counted.columns(advantages=over_tokens(estimates, counted.mask_BR))
