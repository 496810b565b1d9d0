"""Rows on a rank: what its calls are given, fetched from where it is kept, and what they return, kept for others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from hybridengine.controller.calls import Arguments, Call, InputFailedError
from hybridengine.errors import ProtocolError
from hybridengine.runtime.row_reader import RowReader
from hybridengine.runtime.row_requests import RowsRequest
from hybridengine.runtime.row_store import RowStore
from hybridengine.runtime.stored_rows import StoredRows


@dataclass(frozen=True)
class Fetched:
    """Arguments of a call with their rows."""

    arguments: Arguments
    seconds: float
    transferred: dict[str, int]
    """Bytes that came from other processes, by the call that had produced them."""


class RankRows:
    """Rows of one rank's process.

    Args:
        node: address of the machine.
        secret: shared by all processes of the run.
        timeout_s: longest that another process may take to hand rows over.
    """

    def __init__(self, node: str, secret: bytes, timeout_s: float) -> None:
        self._store = RowStore(node, secret)
        self._reader = RowReader(secret, timeout_s)

    def fetch(self, call: Call, arguments: Arguments, batches: Sequence[StoredRows | None]) -> Fetched:
        """The call's arguments, with rows in place of requests.

        Raises:
            InputFailedError: a call that should have produced rows failed.
            ProtocolError: nobody has produced a column that the method reads.
            TransferError: rows cannot be fetched.
        """
        self._store.drop(call.dropped)
        if any(batch is None for batch in batches):
            raise InputFailedError(f"rows that {call} was given were never produced")

        def own(key: int) -> StoredRows:
            stored = self._store.find(key)
            if stored is None:  # references are held until the call has ended: nobody has dropped it
                raise InputFailedError(f"rows that {call} was given were never produced")
            return stored

        begin, transferred = time.perf_counter(), Counter[str]()

        def value(argument: Any) -> Any:
            if not isinstance(argument, RowsRequest):
                return argument
            return argument.fetch(batches, self._reader, transferred, own)  # type: ignore[arg-type]

        args, kwargs = arguments
        complete = tuple(map(value, args)), {name: value(argument) for name, argument in kwargs.items()}
        return Fetched(complete, time.perf_counter() - begin, dict(transferred))

    def keep(self, call: Call, result: Any) -> StoredRows:
        """Keep the rows that a call has returned.

        Raises:
            ProtocolError: it has returned something else, or another number of rows.
        """
        assert call.key is not None, "a call that returns rows has a key for them"
        if not isinstance(result, TensorDictBase) or not result.batch_dims:
            raise ProtocolError(
                f"{call} returned a {type(result).__name__} and is registered with returns_rows=True; return a"
                " TensorDict with batch_size=[rows]"
            )
        if call.num_rows is not None and result.batch_size[0] != call.num_rows:
            raise ProtocolError(
                f"{call} returned {result.batch_size[0]} rows for {call.num_rows}; return one row for each"
            )
        return self._store.keep(call.key, result)

    def close(self) -> None:
        """Hand out no more rows."""
        self._store.close()
