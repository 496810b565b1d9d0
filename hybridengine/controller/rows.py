"""References to rows that live on the ranks that have produced them.

A `Rows` knows how many rows there are and which call has produced which columns, never their contents. Taking columns,
rows and orders of it moves nothing; a group that gets it fetches, rank by rank, its own rows of the columns that its
method reads, straight from the ranks that have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import ray
import torch
from ray import ObjectRef
from ray.exceptions import RayError
from tensordict import TensorDict, TensorDictBase

from hybridengine.controller.calls import call_log
from hybridengine.controller.futures import Future
from hybridengine.controller.row_requests import RowsOrigin, RowsRequest
from hybridengine.errors import ProtocolError, WorkerError, WrongArgumentsError
from hybridengine.rows.batch import columns_of, num_rows

READ_TIMEOUT_S = 300.0
"""Longest wait for rows that the controller itself wants."""

Index = slice | Sequence[int] | np.ndarray | torch.Tensor


@dataclass(frozen=True, eq=False)
class Produced:
    """The rows of one call: batches of its source ranks, one behind the other."""

    future: Future
    """Its results are the batches' `StoredRows`: Ray keeps their objects as long as somebody has references to these."""
    first_rows: tuple[int, ...]
    """First row of each batch."""
    num_rows: int


Batches = dict[ObjectRef, int]
"""References to the `StoredRows` that a reader needs -> their places among those that are sent along."""


@dataclass(frozen=True)
class Source:
    """Columns of `Rows`: some rows of a call, or of a batch that the controller has."""

    origin: Produced | TensorDict
    rows: np.ndarray | None = None
    """Rows of the origin, in the order of the reference; None for all of them."""
    names: Mapping[str, str] | None = None
    """Columns that count, by the names that they have here -> those that they were produced with; None for all."""

    @property
    def here(self) -> dict[str, str]:
        """Columns of a batch that the controller has, as `names`; of a call nobody knows them yet."""
        if isinstance(self.origin, Produced):
            return {}
        there = columns_of(self.origin)
        names = {name: name for name in there} if self.names is None else self.names
        return {new: old for new, old in names.items() if old in there}

    def take(self, rows: np.ndarray) -> Source:
        return replace(self, rows=rows if self.rows is None else self.rows[rows])


class Rows:
    """A reference to distributed rows.

    Its columns may come from several calls; where two have a column, the later one counts.
    """

    def __init__(self, sources: Sequence[Source], num_rows: int) -> None:
        self._sources, self._num_rows = tuple(sources), num_rows

    @classmethod
    def of(cls, batch: TensorDictBase) -> Rows:
        """Return rows that the controller has: a group that gets them receives them from there."""
        return cls(
            [Source(batch if isinstance(batch, TensorDict) else batch.to_tensordict())], num_rows(batch)
        )

    @classmethod
    def numbered(cls, num_rows: int) -> Rows:
        """Return rows without columns, for methods that need no more than the rows' numbers (`ROW_NUMBERS`)."""
        return cls([], num_rows)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._sources

    @property
    def calls(self) -> list[Future]:
        """Calls that produce the rows."""
        return [source.origin.future for source in self._sources if isinstance(source.origin, Produced)]

    def select(self, *names: str) -> Rows:
        """Return the rows with only these columns. One that nobody has produced is an error where it is needed."""
        return self.select_as(**{name: name for name in names})

    def select_as(self, **names: str) -> Rows:
        """Return the rows with only these columns, by other names: `rows.select_as(cost_values="values")`."""

        def chosen(source: Source) -> Source:
            if source.names is None:
                return replace(source, names=names)
            known = source.names
            return replace(source, names={new: known[old] for new, old in names.items() if old in known})

        return Rows([chosen(source) for source in self._sources], len(self))

    def union(self, *others: Rows | TensorDictBase) -> Rows:
        """Return these rows with the columns of others beside them; a later column replaces an earlier one of its name.

        Raises:
            ProtocolError: they have another number of rows.
        """
        sources = list(self._sources)
        for other in others:
            rows = other if isinstance(other, Rows) else Rows.of(other)
            if len(rows) != len(self):
                raise ProtocolError(
                    f"{len(self)} rows and {len(rows)} rows cannot stand side by side; take the same rows of both"
                )
            sources += rows.sources
        return Rows(sources, len(self))

    def __getitem__(self, index: Index) -> Rows:
        """Return some rows, in any order, also several times: a slice, row numbers, or one truth value per row.

        Raises:
            ProtocolError: a row that is not there.
        """
        rows = _row_numbers(index, len(self))
        return Rows([source.take(rows) for source in self._sources], len(rows))

    def repeat(self, times: int) -> Rows:
        """Return every row `times` times, one behind the other: n samples per prompt."""
        return self[np.repeat(np.arange(len(self)), times)]

    def pad_to_multiple(self, size: int) -> Rows:
        """Return these rows and, behind them, the first ones again until their number is a multiple of `size`."""
        return self[np.arange(-(-len(self) // size) * size) % max(1, len(self))]

    def request(
        self,
        wanted: range,
        columns: Sequence[str] | None,
        batches: Batches,
        optional: Sequence[str] = (),
    ) -> RowsRequest:
        """Return what a rank is sent in place of a range of these rows.

        Args:
            columns: what it reads; None for all.
            optional: what it reads besides, where somebody has produced it.
            batches: gets those that must come with the request.
        """
        names = None if columns is None else {*columns, *optional}
        origins = tuple(_origin(source, wanted, names, batches) for source in self._sources)
        not_sent = () if names is None else {name for source in self._sources for name in source.here} - names
        return RowsRequest(
            wanted.start,
            len(wanted),
            origins,
            None if columns is None else tuple(columns),
            tuple(optional),
            tuple(not_sent),
        )

    def wait(self) -> Rows:
        """Wait until the calls that produce the rows have ended; returns these rows.

        Raises:
            WorkerError: one of them failed, or did not end in time.
        """
        for call in self.calls:
            call.wait()
        return self

    def get(self, *names: str) -> TensorDict:
        """Return a copy of the rows, here in the controller: of these columns, or of all.

        Raises:
            WorkerError: a call that should have produced them failed, or did not end in time.
            ProtocolError: nobody has produced a column.
            TransferError: rows cannot be fetched.
        """
        self.wait()
        batches: Batches = {}
        request = self.request(range(len(self)), names or None, batches)
        try:
            stored = ray.get(list(batches), timeout=READ_TIMEOUT_S)
        except RayError as error:
            raise WorkerError(
                f"the calls of {self!r} ended, but their results are lost ({type(error).__name__}: {error}); a rank or"
                " its node has died since: start again from the last checkpoint"
            ) from error
        rows, received = request.fetch(stored, READ_TIMEOUT_S)
        call_log().payload_bytes += received.object_bytes  # others were counted when their call ended
        return rows.clone()

    def __repr__(self) -> str:
        parts = [
            str(source.origin.future) if isinstance(source.origin, Produced) else "controller"
            for source in self._sources
        ]
        return f"Rows({len(self)} rows of {', '.join(parts)})"

    def __reduce__(self) -> NoReturn:
        raise WrongArgumentsError(
            f"{self!r} cannot be sent to a rank inside another value; pass it as an argument of its own"
        )


def _row_numbers(index: Index, count: int) -> np.ndarray:
    if isinstance(index, slice):
        return np.arange(count)[index].copy()  # torch knows no negative strides
    rows = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if rows.dtype == np.bool_ and rows.shape == (count,):
        return np.flatnonzero(rows)
    if rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
        raise ProtocolError(
            f"rows are chosen by a slice, by row numbers or by {count} truth values, found {rows.dtype}{list(rows.shape)}"
        )
    rows = rows.astype(np.int64)
    outside = rows[(rows < -count) | (rows >= count)]
    if outside.size:
        raise ProtocolError(f"row {int(outside[0])} of {count} rows; choose numbers from 0 to {count - 1}")
    return rows % max(1, count)


def _origin(
    source: Source, wanted: range, columns: set[str] | None, batches: Batches
) -> RowsOrigin | TensorDict:
    rows = (
        np.arange(wanted.start, wanted.stop)
        if source.rows is None
        else source.rows[wanted.start : wanted.stop]
    )
    origin = source.origin
    if isinstance(origin, Produced):
        # Of no rows, the first batch knows the columns.
        numbers = np.unique(np.searchsorted(origin.first_rows, rows, side="right") - 1) if len(rows) else [0]
        references = origin.future.references
        blocks = tuple(
            (origin.first_rows[number], batches.setdefault(references[number], len(batches)))
            for number in numbers
        )
        return RowsOrigin(str(origin.future), blocks, rows, source.names)
    wanted_names = {new: old for new, old in source.here.items() if columns is None or new in columns}
    # In storage of its own: a view would send the whole batch.
    chosen = origin.select(*set(wanted_names.values()))[torch.from_numpy(rows)]
    return TensorDict({new: chosen.get(old) for new, old in wanted_names.items()}, batch_size=[len(rows)])
