"""A call of a worker's method: what one rank gets, what it took, and the calls of all pools that are under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from hybridengine.errors import WorkerError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments, with a `RowsRequest` in place of every batch."""


def map_arguments(arguments: Arguments, function: Callable[[Any], Any]) -> Arguments:
    """Return what `function` makes of each argument."""
    args, kwargs = arguments
    return tuple(map(function, args)), {name: function(value) for name, value in kwargs.items()}


@dataclass(frozen=True)
class Call:
    """A call of a role's method on one rank."""

    role: str
    method: str
    timeout_s: float
    is_source: bool
    """True if the protocol collects this rank's result."""
    num_rows: int | None = None
    """Rows that the method must return on source ranks; None where it returns none."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


class InputFailedError(WorkerError):
    """Rows that a call was given do not exist, because the call that should have produced them failed."""


@dataclass(frozen=True)
class CallRecord:
    """Times and bytes of a call that has ended."""

    role: str
    method: str
    spans: dict[int, tuple[float, float]]
    """Rank -> when it began and ended, in seconds since the epoch."""
    fetch_seconds: dict[int, float]
    """Rank -> how long it took, from the beginning, until its rows were there."""
    transferred: Counter[str]
    """Bytes of rows that other processes had produced, all ranks together, by the call that had."""
    held_bytes: dict[int, dict[str, int]]
    """Rank -> memory that its process held when the call had ended, by name."""
    pool: str = ""
    """Name of the ranks' pool, where a run has several."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"

    @property
    def seconds(self) -> float:
        """Time on the slowest rank."""
        return max(end - begin for begin, end in self.spans.values())


class CallObserver(Protocol):
    """Receives events of calls that are under way; its methods return at once and raise nothing."""

    def call_made(
        self, number: int, role: str, method: str, pool: str, num_ranks: int, inputs: Sequence[int]
    ) -> None:
        """All ranks of a pool have got a call; `inputs` are numbers of the calls whose rows it reads."""

    def rank_ended(self, number: int, pool: str, rank: int) -> None:
        """A rank has ended a call, well or not; comes from a thread of Ray's, in any order."""


class CallLog:
    """Calls of this process, on all its pools: rows go from ranks of any to ranks of any."""

    def __init__(self) -> None:
        self.payload_bytes = 0
        """Bytes of rows that have passed through the controller: sent, fetched, or inside results and arguments."""
        self.records: list[CallRecord] = []
        """Records of calls that have ended well, in that order, since they were last taken."""
        self.unfinished: list[Any] = []
        """Calls (`Future`) in the order in which they were made, without those that are known to have ended well, or
        whose failure was raised and which all ranks have ended."""
        self.observer: CallObserver | None = None
        """Receiver of events."""

    def take_records(self) -> list[CallRecord]:
        """Return the records so far; the next ones begin a new list."""
        records, self.records = self.records, []
        return records


@cache
def call_log() -> CallLog:
    """Return the log of this process."""
    return CallLog()
