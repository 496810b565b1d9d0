"""Timeline of every rank's work: timeline.json, which Perfetto and chrome://tracing can open.

Nodes are processes, ranks are threads, spans are bars and readings are counters; one event per line.
Source: the document "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hybridengine.errors import DataError, UnreadableError, shown
from hybridengine.files import check_regular, parse_json, writing

TIMELINE_FILE = "timeline.json"
FIRST_PID = 1_000_000_001
"""Process number of the first node, above all thread numbers: viewers treat equal numbers specially."""
Event = dict[str, Any]
Place = tuple[str, str, int]
"""Node, pool and rank."""


def row_order(place: Place) -> tuple[str, int, str, int, str]:
    """Return the sort key of a rank's row: by pool and rank, engines (NAME.2, NAME.10) by number."""
    node, pool, rank = place
    return pool.partition(".")[0], len(pool), pool, rank, node


_logger = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder()


# A step of a thousand ranks has tens of thousands of these, which the garbage collector need not follow.
class Span(msgspec.Struct, frozen=True, gc=False):
    """Work of a rank from one moment to another: one bar of the timeline."""

    name: str
    phase: str
    """Kind of work: generate, switch, log-probs, values, updates, transfers, ..."""
    rank: int
    """Rank within its pool."""
    node: str
    role: str
    start_s: float
    """Start in seconds since the epoch, by the clock of the rank's node; likewise `end_s`."""
    end_s: float
    pool: str = ""
    """Name of the pool; empty if the run has one pool."""
    step: int | None = None

    @property
    def row(self) -> str:
        """Name of the rank's row, such as "rank 3"."""
        return _row(self.pool, self.rank)


class Reading(msgspec.Struct, frozen=True, gc=False):
    """Value of a rank at one moment, such as its bytes of memory: one point of a counter."""

    name: str
    rank: int
    node: str
    time_s: float
    value: float
    pool: str = ""

    @property
    def row(self) -> str:
        return _row(self.pool, self.rank)


class _BarArgs(msgspec.Struct, omit_defaults=True, gc=False):
    role: str
    step: int | None = None


class _Bar(msgspec.Struct, tag_field="ph", tag="X", gc=False):
    name: str
    cat: str
    pid: int
    tid: int
    ts: int
    dur: int
    args: _BarArgs


class _PointArgs(msgspec.Struct, gc=False):
    value: float


class _Point(msgspec.Struct, tag_field="ph", tag="C", gc=False):
    name: str
    id: str
    """Distinguishes the counters of a process."""
    pid: int
    tid: int
    ts: int
    args: _PointArgs


@dataclass(frozen=True)
class Timeline:
    """Contents of a timeline file, in the order written."""

    spans: list[Span] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    nodes: dict[int, str] = field(default_factory=dict, compare=False)
    """Node of each process number."""
    places: dict[int, Place] = field(default_factory=dict, compare=False)
    """Rank of each thread number."""

    def add(self, event: Event) -> None:
        """Add an event; raise KeyError, TypeError, ValueError or OverflowError if it is malformed."""
        args, pid, tid = event["args"], event["pid"], event["tid"]
        if event["name"] == "process_name":
            self.nodes[pid] = args["name"]
        elif event["name"] == "thread_name":
            self.places[tid] = self.nodes[pid], args["pool"], args["rank"]
        elif event["ph"] in "XC":
            node, pool, rank = self.places[tid]
            name, start_s = str(event["name"]), _seconds(event["ts"])
            if event["ph"] == "C":
                self.readings.append(Reading(name, rank, node, start_s, float(args["value"]), pool))
                return
            step = args.get("step")
            if not (step is None or isinstance(step, int)):
                raise TypeError(f"step {step!r} is not an integer")
            end_s = _seconds(event["ts"] + event["dur"])
            place = rank, node, str(args["role"])
            self.spans.append(Span(name, str(event["cat"]), *place, start_s, end_s, pool, step))


def _row(pool: str, rank: int) -> str:
    return f"{pool} rank {rank}".lstrip()


class TimelineWriter:
    """Appends spans and readings to a timeline file.

    Guarantees:
        The file is complete JSON after every `write`, which passes its events to the operating system: a process that is
        killed later loses none. What a kill during a write leaves is removed when the file is opened again.
        A span that ends before it starts, because a clock was set back, becomes a bar of zero width.
    """

    def __init__(self, file: str | Path) -> None:
        """Open `file` for appending; raise DataError if it exists and is not a timeline."""
        self._path = Path(file)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = _content(self._path)
        written, self._end = _parsed(self._path, content)
        self._pids = {node: pid for pid, node in written.nodes.items()}
        self._tids = {place: tid for tid, place in written.places.items()}
        if cut := content[self._end :].strip(b"[],\r\n "):
            _logger.warning("%s ended in an unfinished event of %d bytes; cut it off", self._path, len(cut))
        # Unbuffered: data that a full disk has refused must not be written again when the file is closed.
        self._file = self._path.open("r+b" if self._path.exists() else "w+b", buffering=0)
        self._append([])

    def write(self, spans: Iterable[Span], readings: Iterable[Reading] = ()) -> None:
        """Append spans and readings, in any order; raise OutputError if the file cannot be written."""
        spans, readings = list(spans), list(readings)
        events: list[Event | _Bar | _Point] = [*self._names([*spans, *readings])]
        for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
            start_us, end_us = round(span.start_s * 1e6), round(span.end_s * 1e6)
            lasted_us, args = max(0, end_us - start_us), _BarArgs(span.role, span.step)
            events.append(_Bar(span.name, span.phase, *self._numbers(span), start_us, lasted_us, args))
        for one in readings:
            time_us, args = round(one.time_s * 1e6), _PointArgs(one.value)
            events.append(_Point(one.name, one.row, *self._numbers(one), time_us, args))
        self._append(events)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def _names(self, records: Sequence[Span | Reading]) -> list[Event]:
        """Number new nodes and ranks, in order of pool and rank; return the metadata that name them."""
        places = {(one.node, one.pool, one.rank) for one in records}
        events = list[Event]()
        for place in sorted(places - self._tids.keys(), key=row_order):
            node, pool, rank = place
            tid = self._tids[place] = max(self._tids.values(), default=0) + 1
            names: dict[str, dict[str, str | int]] = {}
            if node not in self._pids:
                self._pids[node] = FIRST_PID + len(self._pids)
                names["process_name"] = {"name": node}
            names["thread_name"] = {"name": _row(pool, rank), "pool": pool, "rank": rank}
            numbers = {"pid": self._pids[node], "tid": tid, "ts": 0}
            events += [{"ph": "M", "name": name, **numbers, "args": args} for name, args in names.items()]
        return events

    def _numbers(self, one: Span | Reading) -> tuple[int, int]:
        """Return the process and thread of a rank."""
        return self._pids[one.node], self._tids[one.node, one.pool, one.rank]

    def _append(self, events: Sequence[Event | _Bar | _Point]) -> None:
        lines = b",\n".join(map(_ENCODER.encode, events))
        before = b"[\n" if self._end == 0 else b",\n" if lines else b""
        with writing(self._path):
            self._file.seek(self._end)
            pending = memoryview(before + lines + b"\n]\n")
            while pending:
                pending = pending[self._file.write(pending) or 0 :]
            self._file.truncate()
        self._end += len(before + lines) if lines else 0


def read_timeline(file: str | Path) -> Timeline:
    """Return the contents of a timeline file, if it exists, exact to a microsecond; DataError if it is not a timeline."""
    path = Path(file)
    return _parsed(path, _content(path))[0]


def _seconds(time_us: float) -> float:
    seconds = time_us / 1e6
    if not math.isfinite(seconds):
        raise ValueError(f"{time_us} is not a time")
    return seconds


def _content(path: Path) -> bytes:
    if not path.exists():
        return b""
    check_regular(path)
    return path.read_bytes()


def _parsed(path: Path, content: bytes) -> tuple[Timeline, int]:
    """Return the contents of a file, and the offset at which its last event ends; an unfinished last line is skipped."""
    if content.strip() and not content.lstrip().startswith(b"["):
        raise DataError(f"{path} begins with {content[:40]!r}, a timeline with '['; move the file away")
    timeline, offset, end = Timeline(), 0, 0
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        text = line.strip(b"\r\n ,")
        if text not in (b"", b"[", b"]"):
            try:
                timeline.add(parse_json(text))
                end = offset + line.index(text) + len(text)
            except (UnreadableError, KeyError, TypeError, ValueError, OverflowError) as error:
                if isinstance(error, UnreadableError) and number == len(lines):
                    break
                raise DataError(
                    f"{path}:{number}: {shown(text.decode(errors='replace'))} is not an event that a run writes"
                    f" ({error!r}); name the timeline of a run, or move the file away"
                ) from None
        offset += len(line)
    return timeline, end
