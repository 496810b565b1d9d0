"""Plain PyTorch training of a transformers model in one process: the reference for every parallel layout.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NUM_ROWS = 8
MAX_LENGTH = 12
LENGTHS = torch.tensor([12, 5, 9, 11, 7, 3, 10, 6])

MICRO_BATCHES = {
    1: [[[0, 1, 2], [3], [4, 5], [6, 7]]],
    2: [[[0, 1, 2], [3]], [[4], [5, 6], [7]]],
    4: [[[0, 1, 2]], [[3], [4]], [[5], [6]], [[7]]],
    8: [[[row]] for row in range(8)],
}
"""Data-parallel size -> rank -> rows of each micro-batch: unequal rows, and unequal numbers of micro-batches."""

LR, MIN_LR, DECAY_STEPS, WEIGHT_DECAY, CLIP_GRAD, BETAS, EPS = 1e-2, 1e-3, 6, 0.1, 0.5, (0.9, 0.95), 1e-4


def cosine_lr(step: int) -> float:
    return MIN_LR + (LR - MIN_LR) * 0.5 * (1.0 + math.cos(math.pi * step / DECAY_STEPS))


def make_batch(step: int) -> dict[str, Tensor]:
    """Return columns `tokens` [B, T], `targets` [B, T] (values to regress on) and `lengths` [B]."""
    generator = torch.Generator().manual_seed(step)
    return {
        "tokens": torch.randint(0, 131, (NUM_ROWS, MAX_LENGTH), generator=generator),
        "targets": torch.randn(NUM_ROWS, MAX_LENGTH, generator=generator),
        "lengths": LENGTHS,
    }


def micro_batches(step: int, dp_rank: int, dp_size: int) -> list[dict[str, Tensor]]:
    """Return the rows of one data-parallel rank, with each micro-batch cut to its longest row."""
    batch = make_batch(step)
    cut = []
    for rows in MICRO_BATCHES[dp_size][dp_rank]:
        longest = int(LENGTHS[rows].max())
        cut.append(
            {
                name: column[rows][:, :longest] if column.dim() > 1 else column[rows]
                for name, column in batch.items()
            }
        )
    return cut


def token_mask(batch: dict[str, Tensor], dropped: int) -> Tensor:
    """Return a mask [B, T - dropped] of the positions below the row's length, less `dropped` at the end."""
    positions = torch.arange(batch["tokens"].size(1) - dropped)
    return positions < (batch["lengths"] - dropped).unsqueeze(1)


def language_loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return (mean negative log-likelihood of the next tokens, number of tokens)."""
    log_probs = model(batch["tokens"]).logits[:, :-1].log_softmax(-1)
    picked = log_probs.gather(-1, batch["tokens"][:, 1:, None])[..., 0]
    mask = token_mask(batch, 1)
    return -(picked * mask).sum() / mask.sum(), int(mask.sum())


def value_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return (mean squared error of the score of every token, number of tokens)."""
    values = model.score(model.model(batch["tokens"]).last_hidden_state)[..., 0]
    mask = token_mask(batch, 0)
    return ((values - batch["targets"]).square() * mask).sum() / mask.sum(), int(mask.sum())


@dataclass(frozen=True)
class Step:
    """Figures of one optimizer step."""

    loss: float
    grad_norm: float
    lr: float


def train(
    model: torch.nn.Module,
    loss: Callable[[torch.nn.Module, dict[str, Tensor]], tuple[Tensor, int]],
    num_steps: int,
) -> list[Step]:
    """Train with AdamW, clipping and a cosine schedule on the whole batch; decay matrices only, like Megatron-core."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        betas=BETAS,
        eps=EPS,
    )
    steps = []
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = cosine_lr(step)
        optimizer.zero_grad()
        value, _ = loss(model, make_batch(step))
        value.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        steps.append(Step(value.item(), grad_norm.item(), cosine_lr(step)))
    return steps
