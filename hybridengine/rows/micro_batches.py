"""Mini-batches of a batch's rows, their micro-batches cut to the longest row, and restoring the row order of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.errors import ProtocolError
from hybridengine.rows.balance import balance_rows
from hybridengine.rows.batch import columns_of
from hybridengine.rows.images import IMAGES, image_columns
from hybridengine.rows.supports import SUPPORTS, support_columns

SEQUENCE_COLUMNS = ("tokens", "prompt_lengths", "response_lengths")
"""Columns of prompt and response rows."""
ROUTES = "routes"
"""Column of the experts of each token, [B, T, L, K] with L layers of K experts each; -1 where the router chooses."""
RESPONSE_MASK = "response_mask"
"""Column of episodes, bool [B, R]: False at response tokens that the model did not draw, or that are not trained."""
TEACHER_COLUMNS = ("teacher_top_ids", "teacher_top_log_probs")
"""Columns of a teacher's most likely tokens and their log-probs, [B, R, K]."""
CLIENT_COLUMNS = ("tokens", "lengths", "targets")
"""Columns of rows without a prompt: inputs and targets [B, T], and the number of valid positions [B]."""


@dataclass(frozen=True)
class MicroRows:
    """Rows of a batch, cut to the longest of them."""

    rows: list[int]
    """Indices of the rows in the batch."""
    columns: dict[str, Tensor]
    """`tokens` [b, t] and `lengths` [b]; `positions` [b, r], that of the token before response token j, -1 beyond the
    response; `mask` [b, r], see `loss_mask`; `routes` [b, t, L, K] and `TEACHER_COLUMNS` if the batch has them, and the
    columns of `support_columns` and `image_columns` if it has supports and images; and the requested response-aligned
    columns, [b, r]. Rows without a prompt have all columns at all positions, [b, t], and no `positions`."""


def cut_rows(
    batch: TensorDictBase, max_tokens: int, response_columns: Sequence[str] = (), unit: int = 1
) -> list[MicroRows]:
    """Return the micro-batches of prompts and responses; each `unit` of consecutive rows stays together and in order.

    Raises:
        ConfigError: one row alone exceeds `max_tokens`.
        ProtocolError: a response-aligned column does not have one value per response token.
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
        for units in balance_rows(lengths.sum(1).tolist(), max_tokens)
        for rows in [[number * unit + place for number in units for place in range(unit)]]
    ]


def loss_mask(batch: TensorDictBase, width: int, rows: list[int] | slice = slice(None)) -> Tensor:
    """Return a mask, bool [b, width], of the tokens of a loss: response tokens of kept rows that are trained.

    `keep` [B], `trained` and `RESPONSE_MASK` [B, R], all bool, exclude rows and tokens; without these columns all are
    included.
    """
    mask = torch.arange(width) < batch["response_lengths"][rows].unsqueeze(1)
    if "keep" in columns_of(batch):
        mask &= batch["keep"][rows].unsqueeze(1)
    for name in ("trained", RESPONSE_MASK):
        if name in columns_of(batch):
            mask &= batch[name][rows, :width]
    return mask


def drawn_tokens(rows: TensorDictBase, width: int) -> Tensor:
    """Return a mask, bool [B, width], of response tokens that the model drew; all are, unless rows are episodes."""
    mask = torch.arange(width, device=rows["response_lengths"].device) < rows["response_lengths"].unsqueeze(1)
    return mask & rows[RESPONSE_MASK] if RESPONSE_MASK in columns_of(rows) else mask


def _columns(batch: TensorDictBase, rows: list[int], response_columns: Sequence[str]) -> dict[str, Tensor]:
    prompts, responses = batch["prompt_lengths"][rows], batch["response_lengths"][rows]
    width, longest = int((prompts + responses).max()), max(1, int(responses.max()))
    places = torch.arange(longest)
    columns = {
        "tokens": batch["tokens"][rows, :width],
        "lengths": prompts + responses,
        "positions": (prompts.unsqueeze(1) - 1 + places).masked_fill(places >= responses.unsqueeze(1), -1),
        "mask": loss_mask(batch, longest, rows),
    }
    if ROUTES in columns_of(batch):
        columns[ROUTES] = batch[ROUTES][rows, :width]
    for name in (name for name in TEACHER_COLUMNS if name in columns_of(batch)):
        columns[name] = batch[name][rows, :longest]
    if SUPPORTS in columns_of(batch):
        entries = batch.get(SUPPORTS).tolist()
        columns |= support_columns([entries[row] for row in rows], responses.tolist(), longest)
    if IMAGES in columns_of(batch):
        entries = batch.get(IMAGES).tolist()
        columns |= image_columns([entries[row] for row in rows])
    return columns | {name: batch[name][rows, :longest] for name in response_columns}


def cut_whole_rows(batch: TensorDictBase, max_tokens: int, columns: Sequence[str]) -> list[MicroRows]:
    """Return the micro-batches of rows without a prompt; a row of length 0 takes part with one masked position.

    Raises ConfigError if one row alone exceeds `max_tokens`.
    """
    lengths = batch["lengths"].clamp(min=1)

    def cut(rows: list[int]) -> dict[str, Tensor]:
        width = int(lengths[rows].max())
        mask = torch.arange(width) < batch["lengths"][rows].unsqueeze(1)
        row_lengths = {"lengths": lengths[rows], "mask": mask}
        return row_lengths | {name: batch[name][rows, :width] for name in columns}

    return [MicroRows(rows, cut(rows)) for rows in balance_rows(lengths.tolist(), max_tokens)]


def with_empty_rows(batch: TensorDict, num_rows: int) -> TensorDict:
    """Return the rows, followed by rows of zeros if there are fewer than `num_rows`: each replica needs one."""
    empty = batch[:1].apply(torch.zeros_like)
    return cast(TensorDict, torch.cat([batch, *[empty] * (num_rows - len(batch))]))  # pyright: ignore[reportCallIssue, reportArgumentType]


def padded_routes(routes: Sequence[np.ndarray], width: int) -> Tensor:
    """Return the experts of rows of `width` tokens, [B, width, L, K]; -1 where an engine has chosen none."""
    padded = np.full((len(routes), width, *routes[0].shape[1:]), -1, routes[0].dtype)
    for row, one in zip(padded, routes, strict=True):
        row[: len(one)] = one
    return torch.from_numpy(padded)


def gather_rows(parts: Sequence[tuple[MicroRows, Tensor]], num_rows: int, width: int) -> Tensor:
    """Return [num_rows, width, ...] float32 from the [b, r, ...] results of micro-batches; zero where they are masked."""
    whole = torch.zeros(num_rows, width, *parts[0][1].shape[2:])
    for micro, values in parts:
        mask = micro.columns["mask"].reshape(*values.shape[:2], *[1] * (values.ndim - 2))
        part = values.detach().float().cpu().masked_fill(~mask, 0.0)
        whole[micro.rows, : part.size(1)] = part
    return whole


def draw_mini_batches(numbers_B: Tensor, count: int, unit: int, seed: int) -> tuple[Tensor, ...]:
    """Return the rows of each of `count` mini-batches, as indices into `numbers_B`; `seed` is the same on all ranks.

    Each mini-batch gets one at random of every `count` consecutive units among all rows. So it does not depend on how
    many replicas share the rows, as long as each has a multiple of `count` units. Other numbers of units are split so
    that mini-batches differ by at most one unit and none is empty.

    Args:
        numbers_B: int64, numbers of this replica's rows among those of all replicas, ascending.
        unit: number of consecutive rows that stay together.
    """
    units = numbers_B[::unit] // unit
    blocks, places = units // count, units % count
    generator = torch.Generator().manual_seed(seed)
    # Drawn block by block from the first: a caller that needs fewer blocks draws the same values for them.
    drawn = torch.rand(int(blocks[-1]) + 1, count, generator=generator, dtype=torch.float64).argsort(dim=1)
    order = drawn[blocks, places].argsort(stable=True)
    return tuple((part[:, None] * unit + torch.arange(unit)).flatten() for part in order.tensor_split(count))
