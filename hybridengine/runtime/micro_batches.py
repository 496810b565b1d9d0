"""Micro-batches of about equal work: rows are dealt out by their token counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor

from hybridengine.errors import ConfigError, ProtocolError
from hybridengine.runtime.batch import columns_of

SEQUENCE_COLUMNS = ("tokens", "prompt_lengths", "response_lengths")
"""What rows of prompts and responses consist of."""


@dataclass(frozen=True)
class MicroRows:
    """Some rows of a batch, cut to their own longest prompt and response."""

    rows: list[int]
    """Their places in the batch."""
    columns: dict[str, Tensor]
    """`tokens` [b, t]; `positions` [b, r], where in the model's output the distribution of response token j is found;
    `mask` [b, r], True at response tokens of rows that are kept; and the response-aligned columns asked for, [b, r]."""


def cut_rows(
    batch: TensorDictBase, max_tokens: int, response_columns: Sequence[str] = (), unit: int = 1
) -> list[MicroRows]:
    """Micro-batches of a batch of prompts and responses (`SEQUENCE_COLUMNS`).

    Args:
        unit: so many rows, one behind the other, stay together and in order.

    Raises:
        ConfigError: one row alone exceeds `max_tokens`.
        ProtocolError: a response-aligned column that has no value for each response token.
    """
    longest = int(batch["response_lengths"].max()) if len(batch) else 0
    for name in response_columns:
        if batch[name].dim() != 2 or batch[name].size(1) < longest:
            raise ProtocolError(
                f"column {name!r} has the shape {list(batch[name].shape)}, and {len(batch)} rows with up to {longest}"
                " response tokens need one for each, [B, R]; spread what holds for a whole row over its tokens"
            )
    lengths = (batch["prompt_lengths"] + batch["response_lengths"]).view(-1, unit)
    return [
        MicroRows(rows, _columns(batch, rows, response_columns))
        for units in balance_rows((lengths.amax(1) * unit).tolist(), max_tokens)
        for rows in [[number * unit + place for number in units for place in range(unit)]]
    ]


def _columns(batch: TensorDictBase, rows: list[int], response_columns: Sequence[str]) -> dict[str, Tensor]:
    prompts, responses = batch["prompt_lengths"][rows], batch["response_lengths"][rows]
    width, longest = int((prompts + responses).max()), max(1, int(responses.max()))
    steps = torch.arange(longest)
    mask = steps < responses.unsqueeze(1)
    if "keep" in columns_of(batch):
        mask &= batch["keep"][rows].unsqueeze(1)
    columns = {
        "tokens": batch["tokens"][rows, :width],
        "positions": (prompts.unsqueeze(1) - 1 + steps).clamp(max=width - 1),
        "mask": mask,
    }
    return columns | {name: batch[name][rows, :longest] for name in response_columns}


def gather_rows(parts: Sequence[tuple[MicroRows, Tensor]], num_rows: int, width: int) -> Tensor:
    """[num_rows, width] float32 from the [b, r] results of micro-batches; zero beyond each response."""
    whole = torch.zeros(num_rows, width)
    for micro, values in parts:
        part = values.detach().float().cpu().masked_fill(~micro.columns["mask"], 0.0)
        whole[micro.rows, : part.size(1)] = part
    return whole


def balance_rows(token_counts: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row indices of each micro-batch: as few as fit `max_tokens` of padded work, their token counts evened out.

    Rows of similar length are put together, because a micro-batch is padded to its longest row. Every row is in exactly
    one micro-batch; each list is ascending.

    Guarantees: among all ways to cut the rows, sorted by length, into that few runs, the largest has the fewest tokens.

    Raises:
        ConfigError: one row alone exceeds `max_tokens`.
    """
    if not token_counts:
        return []
    longest = max(token_counts)
    if longest > max_tokens:
        raise ConfigError(
            f"a row of {longest} tokens exceeds micro_batch_tokens={max_tokens}; raise micro_batch_tokens to at"
            f" least {longest}"
        )
    by_length = sorted(range(len(token_counts)), key=lambda row: (-token_counts[row], row))
    fewest = len(_cut_runs(by_length, token_counts, max_tokens, sum(token_counts)))
    low, high = longest, sum(token_counts)
    while low < high:
        middle = (low + high) // 2
        if len(_cut_runs(by_length, token_counts, max_tokens, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return [sorted(rows) for rows in _cut_runs(by_length, token_counts, max_tokens, high)]


def _cut_runs(
    by_length: Sequence[int], token_counts: Sequence[int], max_padded: int, max_sum: int
) -> list[list[int]]:
    """Consecutive runs of `by_length`, each as long as its padded work and its token count allow."""
    runs: list[list[int]] = []
    tokens = 0
    for row in by_length:
        if runs:
            padded = (len(runs[-1]) + 1) * token_counts[runs[-1][0]]
            if padded <= max_padded and tokens + token_counts[row] <= max_sum:
                runs[-1].append(row)
                tokens += token_counts[row]
                continue
        runs.append([row])
        tokens = token_counts[row]
    return runs
