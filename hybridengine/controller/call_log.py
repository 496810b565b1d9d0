"""The log of all group calls of this process: those that have not ended, and records of those that have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import Any


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
        self.lock = RLock()
        """Held while outcomes are processed; an observer may poll other calls."""
        self.payload_bytes = 0
        """Bytes of rows transferred through the controller: sent, fetched, or inside results and arguments."""
        self.records: list[CallRecord] = []
        """Records of calls that succeeded since the last `take_records`, in the order in which they ended."""
        self.observer: Callable[[CallRecord], None] | None = None
        """Gets each record in place of `records`, which nobody takes from a process that runs without steps."""
        self.unfinished: list[Any] = []
        """Calls (`calls.Future`) in order of submission, without those known to have succeeded and those that all ranks
        have ended and whose failure was raised."""

    def count(self, payload_bytes: int) -> None:
        """Add to the bytes of rows transferred through the controller; safe in any thread."""
        with self.lock:
            self.payload_bytes += payload_bytes

    def add(self, call: Any) -> None:
        """Add a call that was submitted."""
        with self.lock:
            self.unfinished.append(call)

    def forget(self, calls: Collection[Any]) -> None:
        """Remove calls from the unfinished ones."""
        with self.lock:
            self.unfinished = [call for call in self.unfinished if call not in calls]

    def take_records(self) -> list[CallRecord]:
        """Return the records so far, and start a new list."""
        records, self.records = self.records, []
        return records


@cache
def call_log() -> CallLog:
    """Return the log of this process."""
    return CallLog()
