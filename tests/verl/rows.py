"""Rows of a batch as verl's trainer sends them to an engine, without padding: jagged tensors [B, (T)].

Every row has a length of its own, and some responses have positions that are masked inside.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

PROMPT_TOKENS = (3, 5, 2, 4, 6, 3, 5, 4)
RESPONSE_TOKENS = (7, 4, 11, 6, 3, 12, 5, 9)
NUM_ROWS = len(PROMPT_TOKENS)
MAX_ROW_TOKENS = 16
VOCAB_SIZE = 131
SEED_OF_TEMPERATURES = 97


def columns_of(seed: int, language: bool = True) -> dict[str, list[Tensor]]:
    """Return column -> a tensor of each row, drawn with `seed`; with the columns of a value model if not `language`."""
    generator = torch.Generator().manual_seed(seed)

    def normals(mean: float, deviation: float) -> list[Tensor]:
        return [mean + deviation * torch.randn(size, generator=generator) for size in RESPONSE_TOKENS]

    tokens = [
        torch.randint(0, VOCAB_SIZE, (prompt + response,), generator=generator)
        for prompt, response in zip(PROMPT_TOKENS, RESPONSE_TOKENS, strict=True)
    ]
    masks = [torch.ones(size, dtype=torch.int64) for size in RESPONSE_TOKENS]
    for row in range(0, NUM_ROWS, 3):
        masks[row][1:3] = 0  # a tool's answer
    columns = {
        "input_ids": tokens,
        "position_ids": [torch.arange(len(row)) for row in tokens],
        "prompts": [row[:size] for row, size in zip(tokens, PROMPT_TOKENS, strict=True)],
        "responses": [row[size:] for row, size in zip(tokens, PROMPT_TOKENS, strict=True)],
        "response_mask": masks,
        "loss_mask": masks,
    }
    if language:
        return columns | {
            "old_log_probs": normals(-5.0, 0.3),
            "ref_log_prob": normals(-5.0, 0.3),
            "advantages": normals(0.5, 3.0),
        }
    return columns | {"values": normals(0.0, 1.0), "returns": normals(1.0, 2.0)}


def with_masks_of_whole_rows(columns: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Return the columns with a `loss_mask` of prompts, too, as verl's supervised trainer has it."""
    masks = [
        torch.cat([torch.zeros(len(prompt), dtype=torch.int64), mask])
        for prompt, mask in zip(columns["prompts"], columns["response_mask"], strict=True)
    ]
    return columns | {"loss_mask": masks}


def temperatures() -> Tensor:
    """Return a temperature of each row."""
    generator = torch.Generator().manual_seed(SEED_OF_TEMPERATURES)
    return 0.5 + torch.rand(NUM_ROWS, generator=generator)


def batch_of(
    columns: dict[str, list[Tensor]], replica: int = 0, num_replicas: int = 1, **settings: Any
) -> TensorDict:
    """Return a replica's consecutive rows with what verl's workers add; tensors among `settings` have an entry a row."""
    size = NUM_ROWS // num_replicas
    own = slice(replica * size, (replica + 1) * size)
    values = {
        name: torch.nested.as_nested_tensor(rows[own], layout=torch.jagged) for name, rows in columns.items()
    }
    tensors = {name: value[own] for name, value in settings.items() if isinstance(value, Tensor)}
    batch = TensorDict({**values, **tensors}, batch_size=[size])
    others = {name: value for name, value in settings.items() if name not in tensors}
    tu.assign_non_tensor(batch, global_batch_size=NUM_ROWS, **others)
    return batch
