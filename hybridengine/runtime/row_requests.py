"""What a rank is sent in place of rows: where each column is, and which rows of it are this rank's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from hybridengine.errors import ProtocolError
from hybridengine.runtime.batch import columns_of
from hybridengine.runtime.row_reader import Block, RowReader
from hybridengine.runtime.stored_rows import StoredRows

ROW_NUMBERS = "row_numbers"
"""A column that all rows have: int64, their number among the rows of the call."""


@dataclass(frozen=True)
class RowsOrigin:
    """Some columns of the rows that one call has produced."""

    producer: str
    """The call, "role.method"."""
    blocks: tuple[tuple[int, int | None], ...]
    """(first row, place among the batches that come with the request) of each batch that has some of the rows,
    ascending; None in place of a place for the rank's own batch, which it has."""
    key: int
    """Of the batches, where their owners keep them."""
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
        reader: RowReader,
        transferred: Counter[str] | None = None,
        own: Callable[[int], StoredRows] | None = None,
    ) -> TensorDict:
        """The rows, in memory of their own.

        Args:
            batches: what the origins' blocks refer to.
            transferred: takes the bytes that came from other processes, by producer.
            own: what this process itself keeps under a key.

        Raises:
            ProtocolError: nobody has produced a column.
            TransferError: rows cannot be fetched.
        """
        found: dict[str, _Stored | TensorDict] = {}
        for origin in self.origins:
            source = origin if isinstance(origin, TensorDict) else _Stored.of(origin, batches, own)
            found |= dict.fromkeys(
                columns_of(source) if isinstance(source, TensorDict) else source.names, source
            )
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
        result = TensorDict({}, batch_size=[self.num_rows])
        for name in names:
            origin = found.get(name)
            if origin is None:
                result[name] = torch.arange(self.first, self.first + self.num_rows)
                continue
            if isinstance(origin, TensorDict):
                result[name] = origin.get(name)
                continue
            before = reader.received_bytes
            result[name] = reader.column(origin.names[name], origin.blocks, origin.rows)
            if transferred is not None:
                transferred[origin.producer] += reader.received_bytes - before
        return result


@dataclass(frozen=True, eq=False)
class _Stored:
    """An origin whose batches are there."""

    producer: str
    blocks: list[Block]
    rows: np.ndarray
    names: Mapping[str, str]
    """Columns that it has -> those that they are kept by."""

    @classmethod
    def of(
        cls, origin: RowsOrigin, batches: Sequence[StoredRows], own: Callable[[int], StoredRows] | None
    ) -> _Stored:
        blocks = []
        for first, place in origin.blocks:
            assert place is not None or own is not None, "the controller keeps no batches"
            blocks.append(Block(first, own(origin.key) if place is None else batches[place]))  # type: ignore[misc]
        kept = blocks[0].stored.columns
        named = {name: name for name in kept} if origin.names is None else origin.names
        names = {new: old for new, old in named.items() if old in kept}
        return cls(origin.producer, blocks, origin.rows, names)
