"""Runs on each rank: an actor and a reference that learn to name the colours of images, without a controller."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from hybridengine.config import RunConfig
from hybridengine.data.datasets import PromptDataset
from hybridengine.data.images import image_reader
from hybridengine.data.responses import ResponseDataset
from hybridengine.data.tokenizer import load_tokenizer
from tests.full.colours import colour_reward
from tests.full.engines.vllm_ranks import take_place
from tests.full.engines.worker_ranks import Group
from tests.gloo.row_parts import concat_rows
from workers.actor import ActorWorker
from workers.reference import ReferenceWorker

WARM_UP, STEPS, SAMPLES, PROMPTS = 12, 5, 4, 8


def learn_colours(rank: int, run: RunConfig) -> dict[str, Any]:
    """Warm up, take steps of GRPO, and export; return what each step has seen."""
    take_place(rank)
    tokenizer, reader = load_tokenizer(run.tokenizer_folder), image_reader(run)
    widths = run.rollout.max_prompt_tokens, run.rollout.max_response_tokens
    prompts = PromptDataset(run.train_file, tokenizer, widths[0], reader=reader)
    shown = ResponseDataset(run.train_file, tokenizer, "demonstrations", sum(widths), reader=reader)
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    actor = Group(run, "actor", ActorWorker, rank, folder=run.model_folder, stop_token_ids=(end,))
    reference = Group(run, "reference", ReferenceWorker, rank, folder=run.model_folder)
    seen: dict[str, Any] = {"shares_tower": actor.worker.tower is reference.worker.tower, "steps": []}
    seen["tower_bytes"] = actor.worker.tower.num_bytes
    seen["untrained"], _ = _rollout(actor, prompts.rows(range(PROMPTS)), 7, greedy=True)
    seen["untrained_log_probs"] = actor.call("compute_log_probs", seen["untrained"])["log_probs"]

    actor.call("start_supervised", 3e-3, WARM_UP)
    for step in range(WARM_UP):
        seen["warm_up"] = actor.call("warm_up", shown.batch(step, 16))
    actor.call("start_training")
    for step in range(STEPS):
        numbers = [(step * PROMPTS + number) % len(prompts) for number in range(PROMPTS)]
        rows = prompts.rows([number for number in numbers for _ in range(SAMPLES)])
        rollout, reports = _rollout(actor, rows, 100 * step)
        found = actor.call("compute_log_probs", rollout)
        texts = [
            str(tokenizer.decode(tokens[first : first + length], skip_special_tokens=True))
            for tokens, first, length in zip(
                *(rollout[name].tolist() for name in ("tokens", "prompt_lengths", "response_lengths")),
                strict=True,
            )
        ]
        rewards = torch.tensor(colour_reward(texts, list(rollout["answers"]))).view(-1, SAMPLES)
        batch = concat_rows([rollout])
        batch.update(found)
        batch.update(reference.call("compute_log_probs", rollout))
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        batch["advantages"] = advantages[:, None].expand(-1, widths[1]).clone()
        seen["steps"].append(
            {
                "difference": (rollout["rollout_log_probs"] - found["log_probs"]).abs().max().item(),
                "reward": rewards.mean().item(),
                "reports": reports,
                "update": actor.call("update", batch),
            }
        )
    actor.call("export_model", str(run.run_folder / "saved"), str(run.model_folder))
    return seen


def _rollout(
    actor: Group, rows: TensorDict, seed: int, *, greedy: bool = False
) -> tuple[TensorDict, list[Any]]:
    """Return prompts with responses, and the reports of both switches."""
    reports = actor.call("switch_to_generate")
    rollout = rows.copy().update(actor.call("generate_sequences", rows, seed, greedy=greedy))
    return rollout, [*reports, *actor.call("switch_to_train")]
