"""Requests sent to a rank in place of rows: the location of each column, the rank's rows of it, and reading them."""

from __future__ import annotations

import pickle
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from hybridengine.controller.failures import InputFailedError
from hybridengine.controller.relays import Path
from hybridengine.controller.stored_rows import Content, Owner, StoredColumn, StoredRows, as_bytes
from hybridengine.errors import ProtocolError, TransferError
from hybridengine.rows.batch import columns_of, payload_bytes
from hybridengine.rows.protocols import ROW_NUMBERS

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a call: a `RowsRequest` in place of a batch, an `ItemsRequest` in place of items."""


@dataclass(frozen=True)
class Call:
    """Call of a role's method, the same on all ranks."""

    role: str
    method: str
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


class Batch(NamedTuple):
    """Location of a source rank's `StoredRows`."""

    reference: ObjectRef
    """Reference to them, or to what the relay above the rank has returned."""
    path: Path = ()
    """Where they are below that relay."""


@dataclass(frozen=True)
class Part:
    """A call and its arguments, which are cut for each of some ranks."""

    call: Call
    arguments: Arguments
    batches: Sequence[tuple[int, Path]]
    """(index among the inputs that accompany the call, path below it) of each batch that requests refer to."""


def map_arguments(arguments: Arguments, function: Callable[[Any], Any]) -> Arguments:
    """Return the arguments with `function` applied to each."""
    args, kwargs = arguments
    return tuple(map(function, args)), {name: function(value) for name, value in kwargs.items()}


@dataclass(frozen=True)
class ColumnRows:
    """Rows of a column produced by the call `producer`, "role.method"."""

    producer: str
    name: str
    blocks: Sequence[tuple[int, StoredRows]]
    """(first row, batch) of each batch with some of the rows, ascending."""
    rows: np.ndarray
    """int64, row numbers in the call, in the requested order, with possible repetitions."""

    @property
    def columns(self) -> list[StoredColumn]:
        """Column of each block; raises TransferError if one lacks it, or has it with another type or shape."""
        found = [stored.columns.get(self.name) for _, stored in self.blocks]
        like = found[0]
        for (_, stored), column in zip(self.blocks, found, strict=True):
            if column is None or str(column) != str(like):
                raise TransferError(
                    f"column {self.name!r} of {self.producer} is {like or 'missing'} on {self.blocks[0][1].owner} and"
                    f" {column or 'missing'} on {stored.owner}; all ranks must return the same columns, with rows of one"
                    " shape"
                )
        return [column for column in found if column is not None]


@dataclass
class Received:
    """Columns read, and the bytes transferred to read them."""

    columns: dict[str, Tensor | NonTensorStack] = field(default_factory=dict)
    """Read-only inference tensors, whose memory may be shared with other readers."""
    transferred: Counter[str] = field(default_factory=Counter)
    """Bytes of rows produced by other processes, by producing call."""
    object_bytes: int = 0
    """Bytes of rows read from objects; other rows came inside descriptions."""


def read_columns(wanted: Mapping[str, ColumnRows], timeout_s: float, reader: Owner | None = None) -> Received:
    """Return the requested columns, by requested name. `reader` is this process, or None if it produces no rows.

    Raises TransferError if an object is lost or takes longer than `timeout_s`, or blocks differ in type or shape.
    """
    stored = {name: column.columns for name, column in wanted.items()}
    contents = _objects(wanted, stored, timeout_s)
    received = Received()
    for name, column in wanted.items():
        parts = []
        for (first, batch), kept in zip(column.blocks, stored[name], strict=True):
            places = np.flatnonzero((column.rows >= first) & (column.rows < first + batch.num_rows))
            rows = column.rows[places] - first
            content = kept.content if kept.is_inline else contents[kept.content]
            parts.append((places, rows, content))
            num_bytes = _bytes_of(content, np.unique(rows))
            received.object_bytes += 0 if kept.is_inline else num_bytes
            if batch.owner != reader and num_bytes:
                received.transferred[column.producer] += num_bytes
        received.columns[name] = _assembled(stored[name][0], len(column.rows), parts)
    return received


def _objects(
    wanted: Mapping[str, ColumnRows], stored: Mapping[str, Sequence[StoredColumn]], timeout_s: float
) -> dict[ObjectRef, Content]:
    """Return every required object by its reference, all requested at once."""
    sources = {
        kept.content: (column, batch.owner)
        for name, column in wanted.items()
        for (_, batch), kept in zip(column.blocks, stored[name], strict=True)
        if not kept.is_inline
    }
    if not sources:
        return {}
    try:
        return dict(zip(sources, ray.get(list(sources), timeout=timeout_s), strict=True))
    except RayError as error:
        missing = [(reference, why) for reference in sources if (why := _why_missing(reference))]
        # An object in transfer is not lost: it only did not arrive within a zero timeout.
        missing.sort(key=lambda one: isinstance(one[1], GetTimeoutError))
        reference, why = [*missing, (next(iter(sources)), error)][0]
        reason = f"{type(why).__name__}: {' '.join(str(why).split())}"
        if isinstance(why, GetTimeoutError):
            reason = f"it has not arrived after {timeout_s:g} s"
        column, owner = sources[reference]
        raise TransferError(
            f"column {column.name!r} of {column.producer} cannot be fetched from {owner}: {reason}; if the rank or its"
            " node has died, start again from the last checkpoint"
        ) from error


def _why_missing(reference: ObjectRef) -> RayError | None:
    try:
        ray.get(reference, timeout=0)
    except RayError as error:
        return error
    return None


def _assembled(
    like: StoredColumn, num_rows: int, parts: Sequence[tuple[np.ndarray, np.ndarray, Content]]
) -> Tensor | NonTensorStack:
    """Return the rows of parts (positions, rows of the content, content): consecutive rows of one object as a view."""
    if like.dtype is None:
        values: list[Any] = [None] * num_rows
        for places, rows, content in parts:
            assert not isinstance(content, np.ndarray), "pickled values come as a list"
            for place, row in zip(places, rows, strict=True):
                values[place] = pickle.loads(content[row])
        return NonTensorStack(*values)
    dtype, shape = like.dtype, (num_rows, *like.entry_shape)
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
    """Return bytes as an inference tensor on the same memory, which all readers of the object share.

    In-place operations and backward passes raise; writes through `numpy()` or `data`, or in inference mode, do not.
    """
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if not content.size:  # bytes without any have no strides of another type
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(content).view(dtype).view(shape)


def _bytes_of(content: Content, rows: np.ndarray) -> int:
    if isinstance(content, np.ndarray):
        return len(rows) * content.shape[1]
    return sum(len(content[row]) for row in rows)


def _is_run(numbers: np.ndarray) -> bool:
    return len(numbers) > 0 and bool((np.diff(numbers) == 1).all())


@dataclass(frozen=True)
class RowsOrigin:
    """Some columns of the rows produced by the call `producer`, "role.method"."""

    producer: str
    blocks: tuple[tuple[int, int], ...]
    """(first row, index among the batches that accompany the request) of each batch with some of the rows, ascending."""
    rows: np.ndarray
    """Row numbers in the call, one per requested row."""
    names: Mapping[str, str] | None
    """Selected columns: requested name -> stored name; None for all."""

    def cut(self, part: slice) -> RowsOrigin:
        """Return the origin of some of the rows."""
        rows = self.rows[part]
        blocks = tuple(
            self.blocks[number] for number in block_numbers([first for first, _ in self.blocks], rows)
        )
        return replace(self, rows=rows, blocks=blocks)


@dataclass(frozen=True)
class ItemsRequest:
    """The items of some ranks, one each."""

    wanted: range
    items: Sequence[Any]

    def cut(self, wanted: range) -> Any:
        """Return the item of one rank."""
        return self.items[wanted.start - self.wanted.start]


@dataclass(frozen=True)
class RowsRequest:
    """Request for a rank's rows: the columns of several origins, where later origins override earlier ones."""

    wanted: range
    """Rows of the call."""
    origins: tuple[RowsOrigin | TensorDict, ...]
    """Rows stored elsewhere, or the rows themselves, which are then sent through the controller."""
    columns: tuple[str, ...] | None = None
    """Names of the required columns; None for all."""
    optional: tuple[str, ...] = ()
    """Names of columns that are included if they exist."""
    not_sent: tuple[str, ...] = ()
    """Names of other columns in the controller, for the error that lists the existing ones."""

    def cut(self, wanted: range) -> RowsRequest:
        """Return the request for some of the rows."""
        if wanted == self.wanted:
            return self
        part = slice(wanted.start - self.wanted.start, wanted.stop - self.wanted.start)
        origins = tuple(
            origin.cut(part) if isinstance(origin, RowsOrigin) else origin[part] for origin in self.origins
        )
        return replace(self, wanted=wanted, origins=origins)

    @property
    def batches(self) -> set[int]:
        """Indices of the batches that it refers to."""
        stored = (origin for origin in self.origins if isinstance(origin, RowsOrigin))
        return {index for origin in stored for _, index in origin.blocks}

    def fetch(
        self, batches: Mapping[int, StoredRows], timeout_s: float, reader: Owner | None = None
    ) -> tuple[TensorDict, Received]:
        """Return the rows, read-only, and the cost of reading them.

        Raises ProtocolError if a required column was never produced; for the rest, see `read_columns`.
        """
        found: dict[str, Any] = {}
        for origin in self.origins:
            if isinstance(origin, TensorDict):
                found |= {name: origin.get(name) for name in columns_of(origin)}
            else:
                found |= _columns(origin, batches)
        names, there = tuple(found) if self.columns is None else self.columns, {*found, *self.not_sent}
        found.setdefault(ROW_NUMBERS, torch.arange(self.wanted.start, self.wanted.stop))
        names = dict.fromkeys((*names, *(name for name in self.optional if name in found)))
        if missing := [name for name in names if name not in found]:
            raise ProtocolError(
                f"columns {missing} are needed, and nobody has produced them; there are"
                f" {sorted(there)}: pass rows that have them, e.g. rows.union(others)"
            )
        stored = {name: column for name in names if isinstance(column := found[name], ColumnRows)}
        received = read_columns(stored, timeout_s, reader)
        found |= received.columns
        return TensorDict({name: found[name] for name in names}, batch_size=[len(self.wanted)]), received


def block_numbers(first_rows: Sequence[int] | np.ndarray, rows: np.ndarray) -> Sequence[int]:
    """Return the numbers of the batches with these rows, ascending; without rows, of the first, which defines columns."""
    return np.unique(np.searchsorted(first_rows, rows, side="right") - 1).tolist() if len(rows) else [0]


def _columns(origin: RowsOrigin, batches: Mapping[int, StoredRows]) -> dict[str, ColumnRows]:
    """Return the columns of an origin, by requested name."""
    blocks = [(first, batches[place]) for first, place in origin.blocks]
    kept = dict.fromkeys(name for _, batch in blocks for name in batch.columns)
    names = {name: name for name in kept} if origin.names is None else origin.names
    return {
        new: ColumnRows(origin.producer, old, blocks, origin.rows)
        for new, old in names.items()
        if old in kept
    }


def fetch_arguments(
    part: Part, rows: range, inputs: Sequence[Any], timeout_s: float, reader: Owner
) -> tuple[Arguments, dict[str, Any]]:
    """Return a rank's arguments with rows in place of requests, and the cost of reading them (fields of `Outcome`).

    `inputs` are the values of the references that accompanied the call.
    Raises InputFailedError if a call that should have produced rows failed; for the rest, see `RowsRequest.fetch`.
    """
    begin, transferred = time.perf_counter(), Counter[str]()
    cut = map_arguments(
        part.arguments,
        lambda value: value.cut(rows) if isinstance(value, RowsRequest | ItemsRequest) else value,
    )
    requests = (value for value in (*cut[0], *cut[1].values()) if isinstance(value, RowsRequest))
    needed = sorted({index for request in requests for index in request.batches})
    places = [part.batches[index] for index in needed]
    try:
        batches = find_batches([(inputs[place], path) for place, path in places], timeout_s)
    except RayError as error:
        raise InputFailedError(f"rows that {part.call} was given were never produced ({error})") from error
    if None in batches:
        raise InputFailedError(f"rows that {part.call} was given were never produced")
    found = dict(zip(needed, batches, strict=True))

    def value(argument: Any) -> Any:
        if not isinstance(argument, RowsRequest):
            return argument
        rows, received = argument.fetch(found, timeout_s, reader)
        transferred.update(received.transferred)
        return rows

    return map_arguments(cut, value), {
        "fetch_seconds": time.perf_counter() - begin,
        "transferred": dict(transferred),
        "inline_bytes": sum(batch.inline_bytes for batch in batches),
    }


def find_batches(places: Sequence[tuple[Any, Path]], timeout_s: float) -> list[Any]:
    """Return the batches at (value of `Batch.reference`, path); None for those whose call failed.

    Raises RayError if a process that should have produced them, or its relay, has died.
    """
    found, paths = [value for value, _ in places], [path for _, path in places]
    while below := [index for index, path in enumerate(paths) if path]:
        references = [found[index][0] for index in below]
        lists = dict(zip(set(references), ray.get([*set(references)], timeout=timeout_s), strict=True))
        values = ray.get(
            [lists[one][paths[at][0]] for one, at in zip(references, below, strict=True)], timeout=timeout_s
        )
        for index, value in zip(below, values, strict=True):
            found[index], paths[index] = value, paths[index][1:]
    return found


def traffic_bytes(value: Any) -> int:
    """Return the bytes of the batches in a value, in its items, or in a request; 0 for other values."""
    if isinstance(value, TensorDictBase):
        return payload_bytes(value)
    if isinstance(value, RowsRequest):
        value = value.origins
    if isinstance(value, ItemsRequest):
        value = value.items
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(map(traffic_bytes, value))
    return 0
