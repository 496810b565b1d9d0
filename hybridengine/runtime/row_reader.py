"""Fetches rows from the processes that keep them: from their memory where they run on this host, else over TCP."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack
from torch import Tensor

from hybridengine.errors import TransferError
from hybridengine.runtime import process_memory, row_connection
from hybridengine.runtime.stored_rows import DTYPES, Owner, StoredArray, StoredRows

Runs = list[tuple[int, int]]
"""Entries as (first, number) of each run of consecutive ones."""


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one batch that a process keeps, at their place among the rows of a column."""

    first: int
    stored: StoredRows


class RowReader:
    """Fetches rows for one process.

    What it returns is memory of its own: whoever writes to it changes nobody else's rows.

    Args:
        secret: what the stores on other machines want to hear.
        timeout_s: longest that a store may take to answer.
    """

    def __init__(self, secret: bytes, timeout_s: float) -> None:
        self._secret, self._timeout_s = secret, timeout_s
        self._is_near: dict[Owner, bool] = {}
        self._connections: dict[Owner, Connection] = {}
        self.received_bytes = 0
        """Bytes that came from other processes."""
        self._own_host = process_memory.host()

    def column(self, name: str, blocks: Sequence[Block], rows: np.ndarray) -> Tensor | NonTensorStack:
        """Rows of a column, in the order of `rows`, which may name some more than once.

        Args:
            blocks: batches that have the column, ascending and without gaps.
            rows: int64, places among the rows of all blocks.

        Raises:
            TransferError: a store has ended, does not answer, or has dropped the rows; or blocks differ in type or shape.
        """
        wanted, places = np.unique(rows, return_inverse=True)
        pieces = []
        for block in blocks:
            first, last = np.searchsorted(wanted, [block.first, block.first + block.stored.num_rows])
            if last > first:
                pieces.append((block.stored, _runs(wanted[first:last] - block.first)))
        column = blocks[0].stored.columns[name]
        if column.bounds is not None:
            values = [value for stored, runs in pieces for value in self._objects(name, stored, runs)]
            return NonTensorStack(*(values[place] for place in places))
        fetched = self._tensor(name, pieces, column.values, len(wanted))
        return fetched if _ascends(places) else fetched[torch.from_numpy(places)]

    def _tensor(
        self, name: str, pieces: Sequence[tuple[StoredRows, Runs]], like: StoredArray, num_rows: int
    ) -> Tensor:
        if len(pieces) == 1 and len(pieces[0][1]) == 1:
            view = self._mapped(*pieces[0], name)
            if view is not None:
                return view
        whole = torch.empty((num_rows, *like.entry_shape), dtype=DTYPES[like.dtype])
        taken = 0
        for stored, runs in pieces:
            array = stored.columns[name].values
            if (array.dtype, array.entry_shape) != (like.dtype, like.entry_shape):
                raise TransferError(
                    f"column {name!r} is {like.dtype}{list(like.entry_shape)} on one rank and"
                    f" {array.dtype}{list(array.entry_shape)} on another; all ranks must give rows of one shape"
                )
            count = sum(length for _, length in runs)
            self._read(stored, name, "values", array, runs, whole[taken : taken + count])
            taken += count
        return whole

    def _mapped(self, stored: StoredRows, runs: Runs, name: str) -> Tensor | None:
        """A run of entries as the owner's memory has them, copied when and where it is written to; None where that needs
        another host, or is more work than a copy.
        """
        array = stored.columns[name].values
        ((first, count),) = runs
        if array.descriptor is None or not self._near(stored.owner):
            return None
        with self._blaming(stored, name):
            memory = process_memory.mapped(stored.owner.pid, array.descriptor, array.num_bytes)
            if (
                _peek(stored.owner.pid, stored.key_address) != stored.key
            ):  # the number may be another file's by now
                raise TransferError(_dropped(stored))
        part = memory.view(DTYPES[array.dtype]).view(-1, *array.entry_shape)[first : first + count]
        self._count(stored, part.nbytes)
        return part

    def _objects(self, name: str, stored: StoredRows, runs: Runs) -> list[Any]:
        column = stored.columns[name]
        assert column.bounds is not None, "only values that are not tensors have bounds"
        bounds = torch.empty(sum(length + 1 for _, length in runs), dtype=torch.int64)
        self._read(stored, name, "bounds", column.bounds, [(first, n + 1) for first, n in runs], bounds)
        by_run = [part.tolist() for part in torch.split(bounds, [length + 1 for _, length in runs])]
        byte_runs = [(run[0], run[-1] - run[0]) for run in by_run]
        content = torch.empty(sum(size for _, size in byte_runs), dtype=torch.uint8)
        self._read(stored, name, "values", column.values, byte_runs, content)
        data, begin, values = content.numpy().data, 0, []
        for run in by_run:
            values += [
                pickle.loads(data[begin + low - run[0] : begin + high - run[0]])
                for low, high in pairwise(run)
            ]
            begin += run[-1] - run[0]
        return values

    def _read(
        self, stored: StoredRows, name: str, part: str, array: StoredArray, runs: Runs, target: Tensor
    ) -> None:
        """Fill a contiguous tensor with runs of entries of an array."""
        with self._blaming(stored, name):
            if self._near(stored.owner):
                self._read_memory(stored, array, runs, target)
            else:
                self._ask(stored, name, part, runs, target)
        self._count(stored, target.nbytes)

    def _count(self, stored: StoredRows, num_bytes: int) -> None:
        if (stored.owner.host, stored.owner.pid) != (self._own_host, os.getpid()):
            self.received_bytes += num_bytes

    @contextlib.contextmanager
    def _blaming(self, stored: StoredRows, name: str) -> Iterator[None]:
        """Errors of the system say whose column could not be fetched."""
        try:
            yield
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            self._connections.pop(stored.owner, None)
            owner = stored.owner
            raise TransferError(
                f"column {name!r} cannot be fetched from process {owner.pid} of node {owner.node}:"
                f" {type(error).__name__}: {error}; the process has ended or does not answer"
            ) from error

    def _read_memory(self, stored: StoredRows, array: StoredArray, runs: Runs, target: Tensor) -> None:
        spans, begin = [], target.data_ptr()
        for first, count in runs:
            size = count * array.entry_bytes
            spans.append((array.address + first * array.entry_bytes, begin, size))
            begin += size
        pid = stored.owner.pid
        process_memory.read(pid, spans)
        if _peek(pid, stored.key_address) != stored.key:
            raise TransferError(_dropped(stored))

    def _near(self, owner: Owner) -> bool:
        """Whether the owner's memory can be read from here; tried once."""
        if owner not in self._is_near:
            try:
                is_near = (
                    owner.host == self._own_host != ""
                    and _peek(owner.pid, owner.token_address) == owner.token
                )
            except OSError:
                is_near = False
            self._is_near[owner] = is_near
        return self._is_near[owner]

    def _ask(self, stored: StoredRows, name: str, part: str, runs: Runs, target: Tensor) -> None:
        if stored.owner not in self._connections:
            self._connections[stored.owner] = self._connect(stored.owner)
        connection = self._connections[stored.owner]
        request = {
            "key": stored.key,
            "column": name,
            "part": part,
            "runs": [list(map(int, run)) for run in runs],
        }
        connection.send_bytes(json.dumps(request).encode())
        answer = json.loads(connection.recv_bytes())
        if "error" in answer:
            raise TransferError(_dropped(stored))
        if answer["bytes"] != target.nbytes:
            raise ValueError(f"{answer['bytes']} bytes came instead of {target.nbytes}")
        if target.nbytes:
            connection.recv_bytes_into(target.view(-1).view(torch.uint8).numpy().data)

    def _connect(self, owner: Owner) -> Connection:
        connection = Client((owner.node, owner.port), authkey=None)
        row_connection.configure(connection, self._timeout_s)
        answer_challenge(connection, self._secret)
        deliver_challenge(connection, self._secret)
        return connection


def _peek(pid: int, address: int) -> int:
    """An int64 in the memory of a process."""
    found = torch.zeros(1, dtype=torch.int64)
    process_memory.read(pid, [(address, found.data_ptr(), found.nbytes)])
    return int(found.item())


def _runs(rows: np.ndarray) -> Runs:
    """Runs of consecutive ones among ascending, distinct rows."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts = [0, *breaks.tolist()]
    return [(int(rows[low]), high - low) for low, high in zip(starts, [*starts[1:], len(rows)], strict=True)]


def _ascends(places: np.ndarray) -> bool:
    return bool((places == np.arange(len(places))).all())


def _dropped(stored: StoredRows) -> str:
    return (
        f"rows {stored.key} of process {stored.owner.pid} on node {stored.owner.node} were dropped while they were read;"
        " keep a reference to them until the calls that use them have ended"
    )
