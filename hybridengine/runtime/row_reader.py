"""Assembles rows from the columns that processes have stored."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack
from torch import Tensor

from hybridengine.errors import TransferError
from hybridengine.runtime.stored_rows import (
    DTYPES,
    Content,
    Owner,
    StoredColumn,
    StoredRows,
    as_bytes,
)


class MissingObjectError(Exception):
    """An object cannot be had: its place among those that were asked for, and why."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(place, reason)
        self.place, self.reason = place, reason


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one batch, at their place among the rows of a call."""

    first: int
    stored: StoredRows


@dataclass(frozen=True)
class ColumnRows:
    """Rows of a column that a call has produced."""

    producer: str
    """The call, "role.method"."""
    name: str
    blocks: Sequence[Block]
    """Ascending; all that have some of the rows."""
    rows: np.ndarray
    """int64, rows of the call in the order in which they are wanted; some may be named more than once."""

    @property
    def columns(self) -> list[StoredColumn]:
        """The column in each block.

        Raises:
            TransferError: a block does not have it, or of another type or shape.
        """
        found = [block.stored.columns.get(self.name) for block in self.blocks]
        like = found[0]
        for block, column in zip(self.blocks, found, strict=True):
            if column is None or str(column) != str(like):
                raise TransferError(
                    f"column {self.name!r} of {self.producer} is {like or 'missing'} on {self.blocks[0].stored.owner} and"
                    f" {column or 'missing'} on {block.stored.owner}; all ranks must return the same columns, with rows"
                    " of one shape"
                )
        return [column for column in found if column is not None]


@dataclass
class Received:
    """Columns that were read, and the bytes that this moved."""

    columns: dict[str, Tensor | NonTensorStack] = field(default_factory=dict)
    """Inference tensors to be read only: they may be memory that others read too."""
    transferred: Counter[str] = field(default_factory=Counter)
    """Bytes of rows that other processes have produced, by the call that has."""
    object_bytes: int = 0
    """Bytes of rows that were taken from objects; others came inside descriptions."""


def read_columns(
    wanted: Mapping[str, ColumnRows], get: Callable[[list[Any]], list[Any]], reader: Owner | None = None
) -> Received:
    """Return the columns, by the names that they are wanted by.

    Args:
        get: returns the objects behind references, or raises MissingObjectError.
        reader: this process; None for one that produces no rows.

    Raises:
        TransferError: an object is lost or does not arrive, or blocks differ in type or shape.
    """
    stored = {name: column.columns for name, column in wanted.items()}
    contents = _objects(wanted, stored, get)
    received = Received()
    for name, column in wanted.items():
        parts = []
        for block, kept in zip(column.blocks, stored[name], strict=True):
            places = np.flatnonzero(
                (column.rows >= block.first) & (column.rows < block.first + block.stored.num_rows)
            )
            rows = column.rows[places] - block.first
            content = kept.content if kept.is_inline else contents[kept.content]
            parts.append((places, rows, content))
            num_bytes = _bytes_of(content, np.unique(rows))
            received.object_bytes += 0 if kept.is_inline else num_bytes
            if block.stored.owner != reader and num_bytes:
                received.transferred[column.producer] += num_bytes
        received.columns[name] = _assembled(stored[name][0], len(column.rows), parts)
    return received


def _objects(
    wanted: Mapping[str, ColumnRows],
    stored: Mapping[str, Sequence[StoredColumn]],
    get: Callable[[list[Any]], list[Any]],
) -> dict[Any, Content]:
    """Return every object that is needed, by its reference; all are asked for at once, to arrive side by side."""
    sources = {
        kept.content: (column, block.stored.owner)
        for name, column in wanted.items()
        for block, kept in zip(column.blocks, stored[name], strict=True)
        if not kept.is_inline
    }
    if not sources:
        return {}
    try:
        return dict(zip(sources, get(list(sources)), strict=True))
    except MissingObjectError as error:
        column, owner = list(sources.values())[error.place]
        raise TransferError(
            f"column {column.name!r} of {column.producer} cannot be fetched from {owner}: {error.reason}; if the rank or"
            " its node has died, start again from the last checkpoint"
        ) from error


def _assembled(
    like: StoredColumn, num_rows: int, parts: Sequence[tuple[np.ndarray, np.ndarray, Content]]
) -> Tensor | NonTensorStack:
    """Return the rows of all parts, each of which is (places, rows of the part's content, content).

    Rows in a row of one object are a view of it; others are put together in new memory.
    """
    if like.dtype is None:
        values: list[Any] = [None] * num_rows
        for places, rows, content in parts:
            assert not isinstance(content, np.ndarray), "pickled values come as a list"
            for place, row in zip(places, rows, strict=True):
                values[place] = pickle.loads(content[row])
        return NonTensorStack(*values)
    dtype, shape = DTYPES[like.dtype], (num_rows, *like.entry_shape)
    places, rows, content = parts[0]
    if len(parts) == 1 and _is_run(places) and _is_run(rows) and isinstance(content, np.ndarray):
        return _view(content[rows[0] : rows[-1] + 1], dtype, shape)
    with torch.inference_mode():
        whole = torch.empty(shape, dtype=dtype)
    target = as_bytes(whole)
    for places, rows, content in parts:
        assert isinstance(content, np.ndarray), "tensors come as arrays of bytes"
        if _is_run(places) and _is_run(rows):
            target[places[0] : places[-1] + 1] = content[rows[0] : rows[-1] + 1]
        else:
            target[places] = content[rows]
    return whole


def _view(content: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return bytes as a tensor on the same memory.

    Ray maps its store so that a write goes through, to everybody who reads the object. With an inference tensor torch's
    in-place operations and a backward pass raise; writes through `numpy()` or `data`, or in inference mode, do not.
    """
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(content).view(dtype).view(shape)


def _bytes_of(content: Content, rows: np.ndarray) -> int:
    if isinstance(content, np.ndarray):
        return len(rows) * content.shape[1]
    return sum(len(content[row]) for row in rows)


def _is_run(numbers: np.ndarray) -> bool:
    return len(numbers) > 0 and bool((np.diff(numbers) == 1).all())
