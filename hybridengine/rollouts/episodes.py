"""Columns of rows that are episodes: which tokens are trained, rewards and failures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridengine.config.sections import RolloutSection
from hybridengine.episodes.wire import FAILURES
from hybridengine.report.keys import EPISODE_FAILURE, EPISODE_REWARD, EPISODE_TURNS, episode_key
from hybridengine.rollouts.drawn import CUT, STOPPED
from hybridengine.rollouts.queue import Rollout
from hybridengine.rows.micro_batches import RESPONSE_MASK


def episode_columns(rollouts: Sequence[Rollout], section: RolloutSection) -> dict[str, Tensor]:
    """Return the columns of ended episodes; none for a run without episodes.

    `response_mask` [B, R] bool, True at tokens that are trained; and [B] each: the function's reward, NaN without one;
    its failure, 0 for none, otherwise 1 + its place in `FAILURES`; the number of turns; and the function's metrics, NaN
    if it has not returned them.
    """
    if section.episode is None:
        return {}
    kinds = ["", *FAILURES]
    mask = torch.zeros(len(rollouts), section.max_response_tokens, dtype=torch.bool)
    for row, rollout in zip(mask, rollouts, strict=True):
        row[: len(rollout.marks)] = torch.tensor(rollout.trained, dtype=torch.bool)
    outcomes = [rollout.outcome for rollout in rollouts]
    assert all(outcome is not None for outcome in outcomes), "episodes that have ended"
    nan = float("nan")
    turns = [sum(mark in (CUT, STOPPED) for mark in rollout.marks) for rollout in rollouts]
    found = {
        RESPONSE_MASK: mask,
        EPISODE_REWARD: torch.tensor([nan if one.reward is None else one.reward for one in outcomes]),  # type: ignore[union-attr]
        EPISODE_FAILURE: torch.tensor([kinds.index(one.kind) for one in outcomes]),  # type: ignore[union-attr]
        EPISODE_TURNS: torch.tensor(turns),
    }
    for name in section.episode.metrics:
        values = [one.metrics.get(name, nan) for one in outcomes]  # type: ignore[union-attr]
        found[episode_key(name)] = torch.tensor(values)
    return found
