"""Events of a timeline file, in the trace event format: an array with an event per line.

Source: the document "Trace Event Format" of the Chromium project: complete ("X"), counter ("C") and metadata ("M")
events. The bracket that ends the array may be missing.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridengine.errors import DataError, shown

Event = dict[str, Any]
"""Fields of one event, as in JSON."""
PlainValue = str | int | float | bool | None

HEAD, BETWEEN, TAIL = b"[\n", b",\n", b"\n]\n"
"""What comes before the first event, between two, and after the last."""

FIRST_PID = 1_000_000_001
"""Of the first node. Viewers put a thread whose number is also its process's above all others: here none has it."""
TID_STRIDE = 100_000
"""Thread numbers of rank 3, which viewers show beside its name: 100003, or where that is taken 200003, and so on."""

MAX_LANES = 8
"""Of a rank that are in order; further ones are beside the last."""


@dataclass(frozen=True, order=True)
class RowKey:
    """A row of bars that do not cross: one per rank, and another where bars of one rank overlap without nesting."""

    pool: str
    rank: int
    node: str
    lane: int = 0

    def __str__(self) -> str:
        lane = f" ({self.lane + 1})" if self.lane else ""
        return f"{self.pool} rank {self.rank}".lstrip() + lane


@dataclass
class Row:
    """A thread of the trace, and where its next bar may begin and must end."""

    key: RowKey
    pid: int
    tid: int
    last_start_us: int | None = None
    open_ends_us: list[int] = field(default_factory=list)
    """Ends of the bars around the last one, and its own; the innermost comes last."""

    def takes(self, start_us: int, end_us: int) -> bool:
        """Add the bar and return True; return False where it would cross one that is there."""
        if self.last_start_us is not None and start_us < self.last_start_us:
            return False
        around = [end for end in self.open_ends_us if end > start_us]
        if around and end_us > around[-1]:
            return False
        self.last_start_us, self.open_ends_us = start_us, [*around, end_us]
        return True


class RowTable:
    """Rows of a file and their numbers: those that its metadata name, and new ones."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._rows: dict[RowKey, Row] = {}
        self._by_tid: dict[int, Row] = {}
        self._pools: list[str] = []

    def row_of(self, event: Event) -> Row:
        """The row that `event` is in; KeyError where no metadata named it before."""
        return self._by_tid[event["tid"]]

    def learn(self, event: Event) -> None:
        """Take over what a metadata event names; others say nothing of rows."""
        if (event["ph"], event["name"]) == ("M", "process_name"):
            self._pids[event["args"]["name"]] = event["pid"]
        elif (event["ph"], event["name"]) == ("M", "thread_name"):
            args, nodes = event["args"], {pid: node for node, pid in self._pids.items()}
            key = RowKey(args["pool"], args["rank"], nodes[event["pid"]], args["lane"])
            self._add(Row(key, event["pid"], event["tid"]))

    def find_or_name(self, key: RowKey, events: list[Event]) -> Row:
        """The row of `key`; metadata that name a new one are appended to `events`."""
        if key in self._rows:
            return self._rows[key]
        is_new_node = key.node not in self._pids
        pid = self._pids.setdefault(key.node, FIRST_PID + len(self._pids))
        tid = next(
            tid for tid in itertools.count(key.rank + TID_STRIDE, TID_STRIDE) if tid not in self._by_tid
        )
        if is_new_node:
            events.append(_metadata("process_name", pid, tid, {"name": key.node}))
            events.append(_metadata("process_sort_index", pid, tid, {"sort_index": pid - FIRST_PID}))
        place = {"pool": key.pool, "rank": key.rank, "lane": key.lane}
        events.append(_metadata("thread_name", pid, tid, {"name": str(key), **place}))
        row = self._add(Row(key, pid, tid))
        # Pool by pool in the order of their first bars, and in each of them by rank.
        order = (self._pools.index(key.pool) * TID_STRIDE + key.rank) * MAX_LANES + min(
            key.lane, MAX_LANES - 1
        )
        events.append(_metadata("thread_sort_index", pid, tid, {"sort_index": order}))
        return row

    def _add(self, row: Row) -> Row:
        if row.key.pool not in self._pools:
            self._pools.append(row.key.pool)
        self._rows[row.key] = self._by_tid[row.tid] = row
        return row


def complete_event(
    name: str, phase: str, row: Row, start_us: int, end_us: int, args: Mapping[str, object]
) -> Event:
    """A bar of `row`."""
    place = {"pid": row.pid, "tid": row.tid, "ts": start_us, "dur": end_us - start_us}
    plain = {key: _plain(value) for key, value in args.items()}
    return {"ph": "X", "name": name, "cat": phase, **place, "args": plain}


def counter_event(name: str, row: Row, time_us: int, value: float) -> Event:
    """A point of a counter. Counters belong to a process: the `id` tells those of its ranks apart."""
    place = {"pid": row.pid, "tid": row.tid, "ts": time_us}
    return {"ph": "C", "name": name, "id": str(row.key), **place, "args": {"value": value}}


def as_lines(events: Sequence[Event]) -> bytes:
    """The events as they stand in a file, one per line, nothing before the first and after the last."""
    return BETWEEN.join(json.dumps(event, allow_nan=False).encode() for event in events)


def parse_events(path: Path, content: bytes) -> Iterator[tuple[Event, int]]:
    """Every event of a file with the offset at which its text ends; an unfinished last line is left out.

    Raises:
        DataError: the content is no array, or a line other than the last is no event.
    """
    if not content.strip():
        return
    if not content.lstrip().startswith(b"["):
        raise DataError(f"{path} begins with {content[:40]!r}, a timeline with '['; move the file away")
    offset, lines = 0, content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        text = line.strip(b"\r\n ,")
        if text not in (b"", b"[", b"]"):
            event = _parse(text)
            if event is not None:
                yield event, offset + line.index(text) + len(text)
            elif number < len(lines):
                raise DataError(
                    f"{path}:{number}: {line[:80]!r} is no event, a JSON object on one line; remove the line"
                )
        offset += len(line)


def foreign_event(path: Path, event: Event, error: Exception) -> DataError:
    """The error to raise for an event that no run writes."""
    return DataError(
        f"{path}: {shown(event)} is no event that a run writes ({error!r}); name the timeline of a run, or move the"
        " file away"
    )


def _parse(text: bytes) -> Event | None:
    try:
        event = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _metadata(name: str, pid: int, tid: int, args: Mapping[str, str | int]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": dict(args)}


def _plain(value: object) -> PlainValue:
    """`value` as JSON can hold it, which has no NaN and no infinity."""
    if value is None or isinstance(value, str | int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)
