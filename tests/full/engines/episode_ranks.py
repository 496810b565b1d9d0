"""Runs on each rank: episodes that an actor draws, as a batch and in calls that are interrupted, and their update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from hybridengine.config import RunConfig
from hybridengine.rollouts.queue import Rollout
from hybridengine.rows.protocols import ROW_NUMBERS
from tests.full.engines.vllm_ranks import take_place
from tests.full.engines.worker_ranks import NUM_ROWS, STOP_TOKEN, Group, rollout_of
from workers.actor import ActorWorker
from workers.episodes import TOKEN_COLUMNS, EpisodeRollouts
from workers.prompts import EPISODE_ROWS

FIRST_SEED = 50
STEPS = (2, 1, 4)
"""Engine steps of the calls after which episodes are withdrawn and begun again."""


def draw_episodes(rank: int, run: RunConfig, folder: Path) -> dict[str, Any]:
    take_place(rank)
    actor = Group(run, "actor", ActorWorker, rank, folder=folder, stop_token_ids=(STOP_TOKEN,))
    prompts = rollout_of(run).select("prompt_tokens", "prompt_lengths")
    rows = [
        {"place": f"row {row}", "number": row, "prompt": "1", "answer": str(row)} for row in range(NUM_ROWS)
    ]
    prompts[EPISODE_ROWS] = NonTensorStack(*map(json.dumps, rows))
    prompts[ROW_NUMBERS] = torch.arange(NUM_ROWS)
    actor.call("start_training")
    actor.call("switch_to_generate")
    drawn = actor.call("generate_sequences", prompts, first_seed=FIRST_SEED)
    own = interrupted(actor.worker._rollouts, prompts)
    actor.call("switch_to_train")
    batch = prompts.clone().update(drawn)
    batch.update(actor.call("compute_log_probs", batch))
    trained = actor.call("update", with_advantages(batch))
    actor.worker.close()
    return {"rows": batch, "interrupted": own, "metrics": trained[0]}


def with_advantages(batch: TensorDict) -> TensorDict:
    """Return the batch with advantages that are not numbers where no token is trained."""
    advantages = torch.randn(batch["log_probs"].shape, generator=torch.Generator().manual_seed(1))
    keep = batch["episode/failure"] == 0
    return batch.clone().update(
        {"advantages": advantages.masked_fill(~batch["response_mask"], float("nan")), "keep": keep}
    )


def interrupted(rollouts: EpisodeRollouts, prompts: TensorDict) -> dict[int, Rollout]:
    """Return the episodes of all rows, which this engine draws in calls that are interrupted."""
    known = {number: Rollout(number) for number in range(len(prompts))}
    calls = 0
    while left := [one for one in known.values() if not one.has_ended]:
        width = max(len(one.tokens) for one in left)
        numbers = [one.number for one in left]
        columns: dict[str, Any] = {
            "numbers": torch.tensor(numbers),
            "seeds": torch.tensor(numbers) + FIRST_SEED,
            "drawn_lengths": torch.tensor([len(one.tokens) for one in left]),
            "drawn_routes": torch.zeros(len(left), dtype=torch.int64),
        }
        for name in ("drawn_tokens", *TOKEN_COLUMNS):
            values = [getattr(one, name.removeprefix("drawn_")) for one in left]
            columns[name] = torch.tensor([[*row, *[0] * (width - len(row))] for row in values])
        rollouts.begin(prompts[numbers].copy().update(columns))
        for _ in range(3):
            drawn = rollouts.advance(STEPS[calls % len(STEPS)])
            supports = drawn.supports.each(drawn.num_tokens)
            calls += 1
            for index, (number, has_ended, place) in enumerate(drawn.parts()):
                known[number].record(drawn, index, place, supports, has_ended=has_ended)
        rollouts.withdraw()
    return known
