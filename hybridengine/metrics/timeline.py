"""What every rank did when: timeline.json, which Perfetto and chrome://tracing open.

A process per node, a thread per rank, a bar per span, a counter per kind of reading; one event per line.
Source: the document "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridengine.errors import DataError, UnreadableError, shown
from hybridengine.reading import check_regular, parse_json
from hybridengine.writing import writing

TIMELINE_FILE = "timeline.json"
FIRST_PID = 1_000_000_001
"""Process number of the first node. Viewers put a thread that has its process's number above all others: none has."""
STRIDE = 100_000
"""Distance of the thread numbers of equal ranks: rank 3 is thread 100003, or 200003 if that is taken, and so on."""

Event = dict[str, Any]
"""Fields of one event, as in JSON."""
Place = tuple[str, str, int]
"""Node, pool and rank."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Span:
    """What a rank did from one moment to another: a bar of the timeline."""

    name: str
    """Text of the bar, such as "actor.update"."""
    phase: str
    """Kind of work: generate, switch, log-probs, values, updates, transfers, ..."""
    rank: int
    """Rank within its pool."""
    node: str
    role: str
    start_s: float
    """Seconds since the epoch by the clock of the rank's node, as `end_s`."""
    end_s: float
    pool: str = ""
    """Name of the pool if the run has several."""
    step: int | None = None

    @property
    def row(self) -> str:
        """Name of the rank's row, such as "rank 3"."""
        return _row_name(self.pool, self.rank)


@dataclass(frozen=True)
class Reading:
    """A value that a rank had at a moment, such as its bytes of memory: a point of a counter."""

    name: str
    rank: int
    node: str
    time_s: float
    """Seconds since the epoch by the clock of the rank's node."""
    value: float
    pool: str = ""

    @property
    def row(self) -> str:
        """Name of the rank's row, such as "rank 3"."""
        return _row_name(self.pool, self.rank)


@dataclass(frozen=True)
class Timeline:
    """Contents of a timeline file, in the order written."""

    spans: list[Span]
    readings: list[Reading]


class TimelineWriter:
    """Appends spans and readings to a timeline file; a context manager.

    Guarantees:
        The file is whole JSON after every `write`, which hands its events to the operating system: a process that is
        killed later loses none. The unfinished end that a kill in the middle of a write leaves is cut off when the file
        is opened again.
        A span that ends before it starts, because a clock was set back, is a bar of no width.
    """

    def __init__(self, file: str | Path) -> None:
        """Open `file` for appending.

        Raises:
            DataError: the file exists and is not a timeline.
        """
        self._path = Path(file)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = _content(self._path)
        self._places = _Places()
        self._end = 0
        for event, end in _events(self._path, content):
            self._places.learn(self._path, event)
            self._end = end
        if cut := content[self._end :].strip(b"[],\r\n "):
            _logger.warning("%s ended in an unfinished event of %d bytes; cut it off", self._path, len(cut))
        # Unbuffered: what a full disk has refused must not be written once more when the file is closed.
        self._file = self._path.open("r+b" if self._path.exists() else "w+b", buffering=0)
        self._append([])

    def write(self, spans: Iterable[Span], readings: Iterable[Reading] = ()) -> None:
        """Append what has ended since the last write, in any order.

        Raises:
            OutputError: the file cannot be written.
        """
        spans = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
        readings = list(readings)
        events = list[Event]()
        for node, pool, rank in sorted(
            {(one.node, one.pool, one.rank) for one in [*spans, *readings]}, key=lambda place: place[1:]
        ):
            self._places.add((node, pool, rank), events)
        for span in spans:
            start_us, end_us = round(span.start_s * 1e6), round(span.end_s * 1e6)
            args = {"role": span.role} | ({} if span.step is None else {"step": span.step})
            kind = {"ph": "X", "name": span.name, "cat": span.phase}
            time = {"ts": start_us, "dur": max(0, end_us - start_us)}
            events.append(kind | self._places.numbers(span) | time | {"args": args})
        for one in readings:
            kind = {
                "ph": "C",
                "name": one.name,
                "id": one.row,
            }  # the id tells the counters of a process apart
            time = {"ts": round(one.time_s * 1e6)}
            events.append(kind | self._places.numbers(one) | time | {"args": {"value": one.value}})
        self._append(events)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> TimelineWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, events: list[Event]) -> None:
        lines = b",\n".join(json.dumps(event, allow_nan=False).encode() for event in events)
        before = b"[\n" if self._end == 0 else b",\n" if lines else b""
        with writing(self._path):
            self._file.seek(self._end)
            pending = memoryview(before + lines + b"\n]\n")
            while pending:
                pending = pending[self._file.write(pending) or 0 :]
            self._file.truncate()
        self._end += len(before + lines) if lines else 0


class _Places:
    """Process and thread numbers of the ranks of a file: those that its metadata name, and new ones."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._tids: dict[Place, int] = {}
        self._place_of: dict[int, Place] = {}

    def learn(self, path: Path, event: Event) -> None:
        """Take over the numbers that a metadata event names.

        Raises:
            DataError: a run writes no such event.
        """
        try:
            if (event["ph"], event["name"]) == ("M", "process_name"):
                self._pids[event["args"]["name"]] = event["pid"]
            elif (event["ph"], event["name"]) == ("M", "thread_name"):
                args, nodes = event["args"], {pid: node for node, pid in self._pids.items()}
                self._set((nodes[event["pid"]], args["pool"], args["rank"]), event["tid"])
        except (KeyError, TypeError) as error:
            raise _foreign(path, event, error) from None

    def add(self, place: Place, events: list[Event]) -> None:
        """Number a rank that has no numbers yet; the metadata that name it are appended to `events`."""
        if place in self._tids:
            return
        node, pool, rank = place
        is_new_node = node not in self._pids
        pid = self._pids.setdefault(node, FIRST_PID + len(self._pids))
        tid = next(tid for tid in itertools.count(rank + STRIDE, STRIDE) if tid not in self._place_of)
        self._set(place, tid)
        pools = list(dict.fromkeys(pool for _, pool, _ in self._tids))
        metadata: dict[str, dict[str, str | int]] = {}
        if is_new_node:
            metadata |= {"process_name": {"name": node}, "process_sort_index": {"sort_index": pid}}
        metadata["thread_name"] = {"name": _row_name(pool, rank), "pool": pool, "rank": rank}
        metadata["thread_sort_index"] = {"sort_index": pools.index(pool) * STRIDE + rank}
        numbers = {"pid": pid, "tid": tid, "ts": 0}
        events += [{"ph": "M", "name": name} | numbers | {"args": args} for name, args in metadata.items()]

    def numbers(self, one: Span | Reading) -> dict[str, int]:
        """Return the process and the thread of a rank as fields of an event."""
        return {"pid": self._pids[one.node], "tid": self._tids[one.node, one.pool, one.rank]}

    def of(self, event: Event) -> Place:
        """Return the rank that an event belongs to; KeyError if no metadata named it before."""
        return self._place_of[event["tid"]]

    def _set(self, place: Place, tid: int) -> None:
        self._tids[place], self._place_of[tid] = tid, place


def read_timeline(file: str | Path) -> Timeline:
    """Return the spans and readings of a timeline file in the order written; none if there is no file.

    An unfinished last line is skipped. Times are exact to a microsecond.

    Raises:
        DataError: the file is not a timeline; names the line or event.
    """
    path, places, timeline = Path(file), _Places(), Timeline([], [])
    for event, _ in _events(path, _content(path)):
        places.learn(path, event)
        try:
            if event["ph"] == "X":
                timeline.spans.append(_span(event, *places.of(event)))
            elif event["ph"] == "C":
                timeline.readings.append(_reading(event, *places.of(event)))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _foreign(path, event, error) from None
    return timeline


def _span(event: Event, node: str, pool: str, rank: int) -> Span:
    start_s, end_s = _seconds(event["ts"]), _seconds(event["ts"] + event["dur"])
    role, step = event["args"]["role"], event["args"].get("step")
    if not (step is None or isinstance(step, int)):
        raise TypeError(f"step {step!r} is not an integer")
    return Span(str(event["name"]), str(event["cat"]), rank, node, str(role), start_s, end_s, pool, step)


def _reading(event: Event, node: str, pool: str, rank: int) -> Reading:
    value = float(event["args"]["value"])
    return Reading(str(event["name"]), rank, node, _seconds(event["ts"]), value, pool)


def _seconds(time_us: float) -> float:
    seconds = time_us / 1e6
    if not math.isfinite(seconds):
        raise ValueError(f"{time_us} is not a time")
    return seconds


def _row_name(pool: str, rank: int) -> str:
    return f"{pool} rank {rank}".lstrip()


def _content(path: Path) -> bytes:
    if not path.exists():
        return b""
    check_regular(path)
    return path.read_bytes()


def _events(path: Path, content: bytes) -> Iterator[tuple[Event, int]]:
    """Yield every event of a file with the offset at which its text ends; an unfinished last line is skipped.

    Raises:
        DataError: the content is not an array, or a line other than the last is not an event.
    """
    if content.strip() and not content.lstrip().startswith(b"["):
        raise DataError(f"{path} begins with {content[:40]!r}, a timeline with '['; move the file away")
    offset, lines = 0, content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        text = line.strip(b"\r\n ,")
        if text not in (b"", b"[", b"]"):
            event = _parsed(text)
            if event is not None:
                yield event, offset + line.index(text) + len(text)
            elif number < len(lines):
                raise DataError(
                    f"{path}:{number}: {line[:80]!r} is not an event, a JSON object on one line; remove the line"
                )
        offset += len(line)


def _parsed(text: bytes) -> Event | None:
    try:
        event = parse_json(text)
    except UnreadableError:
        return None
    return event if isinstance(event, dict) else None


def _foreign(path: Path, event: Event, error: Exception) -> DataError:
    return DataError(
        f"{path}: {shown(event)} is not an event that a run writes ({error!r}); name the timeline of a run, or move the"
        " file away"
    )
