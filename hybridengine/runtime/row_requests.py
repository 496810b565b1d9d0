"""What a rank is sent in place of rows: where each column is, and which rows of it are this rank's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hybridengine.errors import ProtocolError
from hybridengine.runtime.batch import columns_of
from hybridengine.runtime.row_reader import Block, ColumnRows, Received, read_columns
from hybridengine.runtime.stored_rows import Owner, StoredRows

ROW_NUMBERS = "row_numbers"
"""A column that all rows have: int64, their number among the rows of the call."""


@dataclass(frozen=True)
class RowsOrigin:
    """Some columns of the rows that one call has produced."""

    producer: str
    """The call, "role.method"."""
    blocks: tuple[tuple[int, int], ...]
    """(first row, place among the batches that come with the request) of each batch that has some of the rows,
    ascending."""
    rows: np.ndarray
    """Rows of the call, one for each row that is asked for."""
    names: Mapping[str, str] | None
    """Columns that count, by the names that they shall have -> those that they are kept by; None for all."""


@dataclass(frozen=True)
class RowsRequest:
    """Rows for one rank: the columns of several origins side by side, a later one before an earlier one."""

    first: int
    """Number of the first row among those of the call."""
    num_rows: int
    origins: tuple[RowsOrigin | TensorDict, ...]
    """Rows that are kept elsewhere, or rows themselves, which then come through the controller."""
    columns: tuple[str, ...] | None = None
    """What is wanted; None for everything."""
    optional: tuple[str, ...] = ()
    """What is wanted besides, where it is there."""
    not_sent: tuple[str, ...] = ()
    """What the controller has besides, and nobody wants."""

    def fetch(
        self,
        batches: Sequence[StoredRows],
        get: Callable[[list[Any]], list[Any]],
        reader: Owner | None = None,
    ) -> tuple[TensorDict, Received]:
        """Return the rows, to be read only, and what reading them moved.

        Args:
            batches: what the origins' blocks refer to.
            get, reader: as for `read_columns`.

        Raises:
            ProtocolError: nobody has produced a column.
            TransferError: rows cannot be fetched.
        """
        found: dict[str, TensorDict | ColumnRows] = {}
        for origin in self.origins:
            if isinstance(origin, TensorDict):
                found |= dict.fromkeys(columns_of(origin), origin)
            else:
                found |= _columns(origin, batches)
        names = tuple(found) if self.columns is None else self.columns
        also = (name for name in self.optional if name in found or name == ROW_NUMBERS)
        names = tuple(dict.fromkeys((*names, *also)))
        missing = [name for name in names if name not in found and name != ROW_NUMBERS]
        if missing:
            raise ProtocolError(
                f"columns {missing} are needed, and nobody has produced them; there are"
                f" {sorted({*found, *self.not_sent})}: pass rows that"
                " have them, e.g. rows.union(others)"
            )
        stored = {name: column for name in names if isinstance(column := found.get(name), ColumnRows)}
        received = read_columns(stored, get, reader)
        result = TensorDict({}, batch_size=[self.num_rows])
        for name in names:
            origin = found.get(name)
            if origin is None:
                result[name] = torch.arange(self.first, self.first + self.num_rows)
            else:
                result[name] = origin.get(name) if isinstance(origin, TensorDict) else received.columns[name]
        return result, received


def _columns(origin: RowsOrigin, batches: Sequence[StoredRows]) -> dict[str, ColumnRows]:
    """Return the columns that an origin has, by the names that they shall have."""
    blocks = [Block(first, batches[place]) for first, place in origin.blocks]
    kept = dict.fromkeys(name for block in blocks for name in block.stored.columns)
    names = {name: name for name in kept} if origin.names is None else origin.names
    return {
        new: ColumnRows(origin.producer, old, blocks, origin.rows)
        for new, old in names.items()
        if old in kept
    }
