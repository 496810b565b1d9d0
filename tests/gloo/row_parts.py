"""Parts of a batch as ranks would receive them, and batches joined again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase


def slice_rows(batch: TensorDictBase, rows: range) -> TensorDict:
    """Return a range of rows in storage of their own."""
    return cast(TensorDict, batch[rows.start : rows.stop].clone())


def concat_rows(batches: Sequence[TensorDictBase]) -> TensorDict:
    """Return the rows of all batches, in order."""
    return cast(TensorDict, torch.cat(list(batches)))  # pyright: ignore[reportCallIssue, reportArgumentType]
