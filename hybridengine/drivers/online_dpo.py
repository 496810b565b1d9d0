"""Online DPO's dataflow: of the responses to a prompt, the best and the worst by the judge are a preference.

Source: arXiv 2402.04792, algorithm 1 (the judge is the run's reward); loss of arXiv 2305.18290, equation 7.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from hybridengine.config.algorithm_sections import AlgorithmSection
from hybridengine.drivers.roles import Roles, Sampling, State
from hybridengine.drivers.step_metrics import measure_rollout, switch_metrics


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
    judged = batch.get("scores", "dropped")
    update = actor.update_preferences(batch[preferences(judged, samples)])
    measured = measure_rollout(roles, batch, settings)

    return measured.get()[0] | switch_metrics(to_generate.get(), to_train.get()) | update.get()[0]


def preferences(judged: TensorDictBase, samples: int) -> Tensor:
    """Row numbers of the best and the worst response to each prompt, one behind the other; of equal ones the first.

    A response without a score is neither, as long as there are others. Shapes: `scores` and `dropped` [P·G] -> [2·P].
    """
    scores, dropped = (judged[name].view(-1, samples) for name in ("scores", "dropped"))
    best = scores.masked_fill(dropped, -torch.inf).argmax(1)
    worst = scores.masked_fill(dropped, torch.inf).argmin(1)
    first = torch.arange(len(scores)) * samples
    return torch.stack([first + best, first + worst], dim=1).flatten()
