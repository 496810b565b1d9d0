"""Greedy responses to held-out prompts, scored by the run's own reward."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.metrics import keys
from hybridengine.runtime.batch import concat_rows


def evaluate(actor: WorkerGroup, reward: WorkerGroup, prompts: TensorDict) -> dict[str, float]:
    """`eval/exact_match`, the share of held-out prompts with full score, and `eval/score_mean`.

    Rows are padded with copies of the first one where there are fewer than the ranks want; copies are not counted.
    """
    num_rows = prompts.batch_size[0]
    missing = max(0, max(actor.num_ranks, reward.num_ranks) - num_rows)
    padded = concat_rows([prompts, *[prompts[:1]] * missing])
    padded["seeds"] = torch.zeros(len(padded), dtype=torch.int64)
    actor.switch_to_generate()
    rollout = actor.generate_sequences(padded, greedy=True)
    actor.switch_to_train()
    scores = reward.compute_scores(rollout).get()["scores"][:num_rows]
    return {keys.EXACT_MATCH: float((scores >= 1.0).float().mean()), "eval/score_mean": float(scores.mean())}
