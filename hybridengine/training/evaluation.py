"""Greedy responses to held-out prompts, scored by the run's own reward."""

from __future__ import annotations

from tensordict import TensorDict

from hybridengine.controller.rows import Rows
from hybridengine.drivers.roles import Roles
from hybridengine.errors import DataError
from hybridengine.metrics import keys

NUM_SAMPLES = 16
"""Responses of an evaluation that people may want to read."""
SAMPLE_COLUMNS = ("tokens", "prompt_lengths", "response_lengths", "answers", "scores")


def evaluate(roles: Roles, num_prompts: int) -> tuple[dict[str, float], TensorDict]:
    """(`eval/score_mean`, and of a function alone `eval/exact_match`, the share with full score; some of the responses).

    Where there are fewer prompts than ranks, some are answered twice, and counted once.
    """
    actor, reward = roles.actor, roles.reward
    num_rows = max(num_prompts, actor.num_ranks, reward.num_ranks)
    prompts = roles.prompts.held_out_prompts(Rows.numbered(num_rows))
    actor.switch_to_generate()
    rollout = prompts.union(actor.generate_sequences(prompts, greedy=True))
    actor.switch_to_train()
    answered = rollout.union(reward.compute_scores(rollout))[:num_prompts]
    judged = answered.get("scores", "dropped")
    scores = judged["scores"][~judged["dropped"]]
    if not len(scores):
        raise DataError("none of the held-out responses has a score; look at the reward function's failures")
    metrics = {keys.SCORE_MEAN: float(scores.mean())}
    if reward.has_full_score:
        metrics[keys.EXACT_MATCH] = float((scores >= 1.0).float().mean())
    return metrics, answered[:NUM_SAMPLES].get(*SAMPLE_COLUMNS)
