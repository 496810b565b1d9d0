"""References to rows that live on the ranks that produced them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from tensordict import TensorDict, TensorDictBase

from hybridengine.controller.call_log import call_log
from hybridengine.controller.calls import Future, lost_results
from hybridengine.controller.row_requests import Batch, RowsOrigin, RowsRequest, block_numbers, find_batches
from hybridengine.errors import ProtocolError, WrongArgumentsError
from hybridengine.rows.batch import columns_of, num_rows

READ_TIMEOUT_S = 300.0
"""Time limit for reading rows in the controller."""

Index = slice | Sequence[int] | np.ndarray | torch.Tensor


@dataclass(frozen=True, eq=False)
class Produced:
    """Rows of one call, or of several calls of one method: the batches of their source ranks, concatenated."""

    futures: tuple[Future, ...]
    """Futures of the batches' `StoredRows`: Ray keeps their objects while references to these exist."""
    first_rows: np.ndarray
    """First row of each batch."""
    num_rows: int

    @property
    def batches(self) -> list[Batch]:
        """Locations of the batches."""
        return [batch for future in self.futures for batch in future.batches]

    def __str__(self) -> str:
        return str(self.futures[0])


Batches = dict[Batch, int]
"""Batches that a reader needs -> their numbers in the reader's requests."""


@dataclass(frozen=True)
class Source:
    """Columns of `Rows`: rows of a call, or of a batch in the controller."""

    origin: Produced | TensorDict
    rows: np.ndarray | None = None
    """Rows of the origin, in the order of the reference; None for all."""
    names: Mapping[str, str] | None = None
    """Selected columns: name in this reference -> name at the origin; None for all."""

    @property
    def here(self) -> dict[str, str]:
        """Columns of a batch in the controller, as `names`; empty for a call, whose columns are not known yet."""
        if isinstance(self.origin, Produced):
            return {}
        there = columns_of(self.origin)
        names = {name: name for name in there} if self.names is None else self.names
        return {new: old for new, old in names.items() if old in there}


class Rows:
    """A reference to distributed rows: their number and the calls that produced their columns, never their contents.

    Of columns with the same name, the later one is used. Selecting and reordering columns and rows moves no data; each
    rank of a group that receives the reference fetches its own rows of the columns that the method reads directly from
    the producing ranks.
    """

    def __init__(self, sources: Sequence[Source], num_rows: int) -> None:
        self._sources, self._num_rows = tuple(sources), num_rows

    @classmethod
    def of(cls, batch: TensorDictBase) -> Rows:
        """Return rows for a batch in the controller, which sends it to the groups that receive it."""
        own = batch if isinstance(batch, TensorDict) else batch.to_tensordict()
        return cls([Source(own)], num_rows(batch))

    @classmethod
    def numbered(cls, num_rows: int) -> Rows:
        """Return rows without columns, for methods that only need the row numbers (`ROW_NUMBERS`)."""
        return cls([], num_rows)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def calls(self) -> list[Future]:
        """Calls that produce the rows."""
        origins = [source.origin for source in self._sources]
        return [future for one in origins if isinstance(one, Produced) for future in one.futures]

    def select(self, *names: str) -> Rows:
        """Return the rows with only these columns. Missing columns raise an error when they are read."""
        return self.select_as(**{name: name for name in names})

    def select_as(self, **names: str) -> Rows:
        """Return the rows with only these columns under new names: `rows.select_as(cost_values="values")`."""

        def chosen(known: Mapping[str, str] | None) -> Mapping[str, str]:
            return names if known is None else {new: known[old] for new, old in names.items() if old in known}

        return Rows([replace(source, names=chosen(source.names)) for source in self._sources], len(self))

    def union(self, *others: Rows | TensorDictBase) -> Rows:
        """Return these rows with the columns of the others added; later columns replace earlier ones of the same name.

        Raises ProtocolError if the numbers of rows differ.
        """
        sources = list(self._sources)
        for other in others:
            rows = other if isinstance(other, Rows) else Rows.of(other)
            if len(rows) != len(self):
                raise ProtocolError(
                    f"{len(self)} rows and {len(rows)} rows cannot stand side by side; take the same rows of both"
                )
            sources += rows._sources
        return Rows(sources, len(self))

    def concat(self, *others: Rows) -> Rows:
        """Return these rows followed by those of others, whose columns calls of the same methods have produced.

        Raises ProtocolError if other methods have, or the columns have other names.
        """
        parts = (self, *others)
        if len({len(part._sources) for part in parts}) > 1:
            raise ProtocolError(_other_calls(parts))
        joined = [_joined(sources, parts) for sources in zip(*(part._sources for part in parts), strict=True)]
        return Rows(joined, sum(map(len, parts)))

    def __getitem__(self, index: Index) -> Rows:
        """Return some rows, in any order and with repetitions: a slice, row numbers, or one boolean per row.

        Raises ProtocolError if a row number is out of range.
        """
        rows = _row_numbers(index, len(self))
        taken = [
            replace(source, rows=rows if source.rows is None else source.rows[rows])
            for source in self._sources
        ]
        return Rows(taken, len(rows))

    def repeat(self, times: int) -> Rows:
        """Return every row `times` times in succession, for n samples per prompt."""
        return self[np.repeat(np.arange(len(self)), times)]

    def pad_to_multiple(self, size: int) -> Rows:
        """Return the rows and the first ones again, up to a multiple of `size`; ProtocolError if that is below 1."""
        if size < 1:
            raise ProtocolError(f"pad_to_multiple({size}): `size` must be at least 1, e.g. the replicas")
        return self[np.arange(-(-len(self) // size) * size) % max(1, len(self))]

    def request(
        self, wanted: range, columns: Sequence[str] | None, batches: Batches, optional: Sequence[str] = ()
    ) -> RowsRequest:
        """Return the request for a range of rows, and add the batches that must accompany it to `batches`.

        The rank reads `columns` (None for all), and the `optional` ones that exist.
        """
        names = None if columns is None else {*columns, *optional}
        origins = tuple(_origin(source, wanted, names, batches) for source in self._sources)
        not_sent = () if names is None else {name for source in self._sources for name in source.here} - names
        required = None if columns is None else tuple(columns)
        return RowsRequest(wanted, origins, required, tuple(optional), tuple(not_sent))

    def wait(self) -> Rows:
        """Wait for the calls that produce the rows; return the rows; raise WorkerError if a call fails or is late."""
        for call in self.calls:
            call.wait()
        return self

    def get(self, *names: str) -> TensorDict:
        """Return a copy in the controller of the rows, with these columns or all.

        Raises:
            WorkerError: a call that should have produced them failed, or did not end in time.
            ProtocolError: a column was never produced.
            TransferError: rows cannot be fetched.
        """
        self.wait()
        batches: Batches = {}
        request = self.request(range(len(self)), names or None, batches)
        try:
            inputs = ray.get([batch.reference for batch in batches], timeout=READ_TIMEOUT_S)
            paths = [batch.path for batch in batches]
            stored = find_batches(list(zip(inputs, paths, strict=True)), READ_TIMEOUT_S)
        except RayError as error:
            raise lost_results(f"the calls of {self!r} ended", error) from error
        rows, received = request.fetch(dict(enumerate(stored)), READ_TIMEOUT_S)
        call_log().count(received.object_bytes)  # others were counted when their call ended
        return rows.clone()

    def __repr__(self) -> str:
        parts = [
            str(source.origin) if isinstance(source.origin, Produced) else "controller"
            for source in self._sources
        ]
        return f"Rows({len(self)} rows of {', '.join(parts)})"

    def __reduce__(self) -> NoReturn:
        raise WrongArgumentsError(
            f"{self!r} cannot be sent to a rank inside another value; pass it as an argument of its own"
        )


def _joined(sources: Sequence[Source], parts: Sequence[Rows]) -> Source:
    """Return the source of the rows of all parts, one source of each."""
    names, origins = sources[0].names, [source.origin for source in sources]
    if any(source.names != names for source in sources):
        raise ProtocolError(_other_calls(parts))
    sizes = [one.num_rows if isinstance(one, Produced) else num_rows(one) for one in origins]
    firsts = np.cumsum([0, *sizes[:-1]])
    numbers = [
        np.arange(size) if source.rows is None else source.rows
        for source, size in zip(sources, sizes, strict=True)
    ]
    rows = np.concatenate([first + part for first, part in zip(firsts, numbers, strict=True)])
    calls = [one for one in origins if isinstance(one, Produced)]
    if not calls:
        return Source(torch.cat(origins), rows, names)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if len(calls) < len(origins) or len({*map(str, calls)}) > 1:
        raise ProtocolError(_other_calls(parts))
    first_rows = np.concatenate([first + one.first_rows for first, one in zip(firsts, calls, strict=True)])
    futures = tuple(future for one in calls for future in one.futures)
    return Source(Produced(futures, first_rows, sum(sizes)), rows, names)


def _other_calls(parts: Sequence[Rows]) -> str:
    listed = " and ".join(map(repr, parts))
    return f"{listed} cannot follow one another; join rows that the same methods have produced, under the same names"


def _row_numbers(index: Index, count: int) -> np.ndarray:
    if isinstance(index, slice):
        return np.arange(count)[index].copy()  # torch does not support negative strides
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
    if source.rows is None:
        rows = np.arange(wanted.start, wanted.stop)
    else:
        rows = source.rows[wanted.start : wanted.stop]
    origin = source.origin
    if isinstance(origin, Produced):
        kept, numbers = origin.batches, block_numbers(origin.first_rows, rows)
        first_rows = origin.first_rows[numbers].tolist()
        places = [batches.setdefault(kept[number], len(batches)) for number in numbers]
        blocks = tuple(zip(first_rows, places, strict=True))
        return RowsOrigin(str(origin), blocks, rows, source.names)
    wanted_names = {new: old for new, old in source.here.items() if columns is None or new in columns}
    # Copied to its own storage: a view would send the whole batch.
    chosen = origin.select(*set(wanted_names.values()))[torch.from_numpy(rows)]
    return TensorDict({new: chosen.get(old) for new, old in wanted_names.items()}, batch_size=[len(rows)])
