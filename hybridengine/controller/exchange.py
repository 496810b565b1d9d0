"""Record of the calls of all pools in the controller: seconds that they took, and bytes of rows that have moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol


@dataclass(frozen=True)
class CallRecord:
    """What a call that has ended took."""

    role: str
    method: str
    spans: dict[int, tuple[float, float]]
    """Rank -> when it began and ended, in seconds since the epoch."""
    fetch_seconds: dict[int, float]
    """Rank -> how long it took, from the beginning, until its rows were there."""
    transferred: Counter[str]
    """Bytes of rows that other processes had produced, all ranks together, by the call that had."""
    held_bytes: dict[int, dict[str, int]]
    """Rank -> what its process held when the call had ended, by name."""
    pool: str = ""
    """Whose ranks they are, where a run has several pools."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return max(end - begin for begin, end in self.spans.values())


class CallObserver(Protocol):
    """Told of calls while they are under way; its methods return at once and raise nothing."""

    def call_made(
        self, number: int, role: str, method: str, pool: str, num_ranks: int, inputs: Sequence[int]
    ) -> None:
        """All ranks of a pool have got a call; `inputs` are numbers of the calls whose rows it reads."""

    def rank_ended(self, number: int, pool: str, rank: int) -> None:
        """A rank has ended a call, well or not; comes from a thread of Ray's, in any order."""


class RowExchange:
    """One per controller, for all its pools: rows go from ranks of any to ranks of any."""

    def __init__(self) -> None:
        self.payload_bytes = 0
        """Bytes of rows that have passed through the controller: sent, fetched, or inside results and arguments."""
        self.records: list[CallRecord] = []
        """Of all calls that have ended, in that order, since they were last taken."""
        self.observer: CallObserver | None = None
        """Who is told of calls while they are under way."""

    def take_records(self) -> list[CallRecord]:
        """The records so far; the next ones begin a new list."""
        records, self.records = self.records, []
        return records


@cache
def row_exchange() -> RowExchange:
    """This process's."""
    return RowExchange()
