"""Calls of worker methods: the call of one rank, records of ended calls, and the unfinished calls of all pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from hybridengine.errors import WorkerError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments, with a `RowsRequest` in place of every batch."""


def map_arguments(arguments: Arguments, function: Callable[[Any], Any]) -> Arguments:
    """Return the arguments with `function` applied to each."""
    args, kwargs = arguments
    return tuple(map(function, args)), {name: function(value) for name, value in kwargs.items()}


@dataclass(frozen=True)
class Call:
    """Call of a role's method on one rank."""

    role: str
    method: str
    timeout_s: float
    is_source: bool
    """True if the protocol collects this rank's result."""
    num_rows: int | None = None
    """Number of rows that source ranks must return; None if the method returns no rows."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


class InputFailedError(WorkerError):
    """Input rows of the call do not exist, because the call that should have produced them failed."""


@dataclass(frozen=True)
class CallRecord:
    """Times and bytes of an ended call."""

    role: str
    method: str
    spans: dict[int, tuple[float, float]]
    """Rank -> start and end, in seconds since the epoch."""
    fetch_seconds: dict[int, float]
    """Rank -> seconds from the start of the call until its input rows were available."""
    transferred: Counter[str]
    """Bytes of rows read from other processes, over all ranks, by producing call."""
    held_bytes: dict[int, dict[str, int]]
    """Rank -> name -> bytes of memory held by its process at the end of the call."""
    pool: str = ""
    """Name of the ranks' pool, if the run has several."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"

    @property
    def seconds(self) -> float:
        """Duration on the slowest rank."""
        return max(end - begin for begin, end in self.spans.values())


class CallLog:
    """Calls of this process on all of its pools, which may exchange rows."""

    def __init__(self) -> None:
        self.payload_bytes = 0
        """Bytes of rows transferred through the controller: sent, fetched, or inside results and arguments."""
        self.records: list[CallRecord] = []
        """Records of calls that succeeded since the last `take_records`, in the order in which they ended."""
        self.unfinished: list[Any] = []
        """Calls (`Future`) in order of submission, without those known to have succeeded and those that all ranks have
        ended and whose failure was raised."""

    def take_records(self) -> list[CallRecord]:
        """Return the records so far, and start a new list."""
        records, self.records = self.records, []
        return records


@cache
def call_log() -> CallLog:
    """Return the log of this process."""
    return CallLog()
