"""Rows on a rank: what its calls are given, fetched from Ray's object store, and what they return, stored there."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase, is_non_tensor

from hybridengine.controller.calls import Arguments, Call, InputFailedError
from hybridengine.controller.row_requests import RowsRequest
from hybridengine.controller.stored_rows import Owner, StoredRows, store_rows
from hybridengine.errors import ProtocolError


class RankRows:
    """Rows of one rank's process.

    Args:
        node: address of the machine.
        timeout_s: longest wait for the rows of a call.
    """

    def __init__(self, node: str, rank: int, timeout_s: float) -> None:
        self._owner = Owner(node, os.getpid(), rank)
        self._timeout_s = timeout_s

    def fetch(
        self, call: Call, arguments: Arguments, batches: Sequence[StoredRows | None]
    ) -> tuple[Arguments, dict[str, Any]]:
        """Return the call's arguments, with rows in place of requests, and what reading them cost (fields of `Outcome`).

        Raises:
            InputFailedError: a call that should have produced rows failed.
            ProtocolError: nobody has produced a column that the method reads.
            TransferError: rows cannot be fetched.
        """
        found = [batch for batch in batches if batch is not None]
        if len(found) < len(batches):
            raise InputFailedError(f"rows that {call} was given were never produced")
        begin, transferred = time.perf_counter(), Counter[str]()

        def value(argument: Any) -> Any:
            if not isinstance(argument, RowsRequest):
                return argument
            rows, received = argument.fetch(found, self._timeout_s, self._owner)
            transferred.update(received.transferred)
            return rows

        args, kwargs = arguments
        complete = tuple(map(value, args)), {name: value(argument) for name, argument in kwargs.items()}
        return complete, {
            "fetch_seconds": time.perf_counter() - begin,
            "transferred": dict(transferred),
            "inline_bytes": sum(batch.inline_bytes for batch in found),
        }

    def keep(self, call: Call, result: Any) -> StoredRows:
        """Store the rows that a call has returned, and return their description.

        Raises:
            ProtocolError: it has returned something else, or another number of rows.
            StorageError: there is no room for them.
        """
        if not isinstance(result, TensorDictBase) or not result.batch_dims:
            raise ProtocolError(
                f"{call} returned a {type(result).__name__} and is registered with returns_rows=True; return a"
                " TensorDict with batch_size=[rows]"
            )
        if result.batch_size[0] != call.num_rows:
            raise ProtocolError(
                f"{call} returned {result.batch_size[0]} rows for {call.num_rows}; return one row for each"
            )
        for name, column in result.items():
            if isinstance(column, TensorDictBase) and not is_non_tensor(column):
                raise ProtocolError(
                    f"{call} returned the column {name!r} as a TensorDict; return its columns by names of their own"
                )
        return store_rows(result, self._owner)
