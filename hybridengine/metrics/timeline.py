"""What every rank did when: timeline.json, which Perfetto and chrome://tracing open.

A process per node, a thread per rank, a bar per span, a counter per kind of reading. The file is whole JSON after every
write, so that anyone may read it while the run goes on.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from hybridengine.errors import DataError
from hybridengine.metrics.trace_events import (
    BETWEEN,
    HEAD,
    TAIL,
    Event,
    PlainValue,
    Row,
    RowKey,
    RowTable,
    as_lines,
    complete_event,
    counter_event,
    foreign_event,
    parse_events,
)
from hybridengine.reading import check_regular
from hybridengine.writing import writing

TIMELINE_FILE = "timeline.json"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Span:
    """What a rank did from one moment to another: a bar of the timeline."""

    name: str
    """What the bar says, such as "actor.update"."""
    phase: str
    """What it counts as: generate, switch, log-probs, values, updates, transfers, ..."""
    rank: int
    """Within its pool."""
    node: str
    role: str
    start_s: float
    """Seconds since the epoch, as `end_s`."""
    end_s: float
    pool: str = ""
    """Where pools have ranks of their own: which."""
    step: int | None = None
    args: Mapping[str, PlainValue] = field(default_factory=dict)
    """What else a viewer should show of the bar; not `role` and `step`, which it shows anyway."""

    @property
    def row(self) -> str:
        """Name of the rank's row, such as "rank 3"."""
        return str(RowKey(self.pool, self.rank, self.node))


@dataclass(frozen=True)
class Reading:
    """What was read off a rank at a moment, such as its bytes of memory: a point of a counter."""

    name: str
    rank: int
    node: str
    time_s: float
    """Seconds since the epoch."""
    value: float
    pool: str = ""

    @property
    def row(self) -> str:
        """Name of the rank's row, such as "rank 3"."""
        return str(RowKey(self.pool, self.rank, self.node))


@dataclass(frozen=True)
class Timeline:
    """Contents of a timeline file, in the order written."""

    spans: list[Span]
    readings: list[Reading]


class TimelineWriter:
    """Appends spans and readings to a timeline file; a context manager.

    Guarantees:
        The file is whole JSON after every `write`, which hands its events to the operating system in one piece: a
        process that is killed later loses none of them. Linux may stop a write of many pages between two of them
        when it kills the process, and a machine may go down: the unfinished end of a file that is there already is
        cut off, and the file continued.
        Bars of one row nest or follow each other. A rank's bars that cross get a second row, because viewers
        leave out or misplace what crosses.
        A span that ends before it starts, because a clock was set back, is a bar of no width.
    """

    def __init__(self, file: str | Path) -> None:
        """Open `file` for appending.

        Raises:
            DataError: the file is there and is no timeline.
        """
        self._path = path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        self._rows = RowTable()
        self._end = 0
        for event, end in parse_events(path, content):
            _learn(self._rows, path, event)
            self._end = end
        if cut := content[self._end :].strip(b"[],\r\n "):
            _logger.warning("%s ended in an unfinished event of %d bytes; cut it off", path, len(cut))
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._append([])

    def write(
        self,
        spans: Iterable[Span],
        readings: Iterable[Reading] = (),
        clocks_ahead_s: Mapping[int, float] | None = None,
    ) -> None:
        """Append what has ended since the last write, in any order.

        Args:
            spans: best those of a whole step: a bar nests in those of the same write or of earlier ones.
            clocks_ahead_s: rank -> by how much its clock is ahead of the controller's; that is taken off its times.

        Raises:
            DataError: a time or value that is not finite, or an argument of a span that is called `role` or `step`.
            OutputError: the disk does not take it.
        """
        ahead_s = clocks_ahead_s or {}
        bars = [(*_interval_us(span, ahead_s.get(span.rank, 0.0)), span, _arguments(span)) for span in spans]
        points = [(_moment_us(reading, ahead_s.get(reading.rank, 0.0)), reading) for reading in readings]
        events: list[Event] = []
        owners = [span for _, _, span, _ in bars] + [reading for _, reading in points]
        for key in sorted({RowKey(owner.pool, owner.rank, owner.node) for owner in owners}):
            self._rows.find_or_name(key, events)
        for start_us, end_us, span, args in sorted(bars, key=lambda bar: (bar[0], -bar[1])):
            row = self._row_that_takes(span, start_us, end_us, events)
            events.append(complete_event(span.name, span.phase, row, start_us, end_us, args))
        for time_us, reading in sorted(points, key=lambda point: point[0]):
            row = self._rows.find_or_name(RowKey(reading.pool, reading.rank, reading.node), events)
            events.append(counter_event(reading.name, row, time_us, reading.value))
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

    def _row_that_takes(self, span: Span, start_us: int, end_us: int, events: list[Event]) -> Row:
        lanes = (RowKey(span.pool, span.rank, span.node, lane) for lane in itertools.count())
        rows = (self._rows.find_or_name(key, events) for key in lanes)
        return next(row for row in rows if row.takes(start_us, end_us))

    def _append(self, events: list[Event]) -> None:
        lines = as_lines(events)
        head = HEAD if self._end == 0 else BETWEEN if lines else b""
        with writing(self._path):
            self._file.seek(self._end)
            pending = memoryview(head + lines + TAIL)
            while pending:
                pending = pending[self._file.write(pending) or 0 :]
            self._file.truncate()
        self._end += len(head + lines) if lines else 0


def read_spans(file: str | Path) -> list[Span]:
    """The spans of a timeline file: the bars of what `read_timeline` reads."""
    return read_timeline(file).spans


def read_timeline(file: str | Path) -> Timeline:
    """The spans and readings of a timeline file in the order written; none where there is no file.

    The unfinished end of a file whose process was killed in a write, or whose machine went down, is left out. Times
    are exact to a microsecond.

    Raises:
        DataError: the file is no regular one, or no timeline; names the line or event.
    """
    path = Path(file)
    timeline, rows = Timeline([], []), RowTable()
    if not path.exists():
        return timeline
    check_regular(path)
    for event, _ in parse_events(path, path.read_bytes()):
        _learn(rows, path, event)
        try:
            if event["ph"] == "X":
                timeline.spans.append(_span(event, rows.row_of(event).key))
            elif event["ph"] == "C":
                timeline.readings.append(_reading(event, rows.row_of(event).key))
        except (KeyError, TypeError, ValueError) as error:
            raise foreign_event(path, event, error) from error
    return timeline


def _learn(rows: RowTable, path: Path, event: Event) -> None:
    try:
        rows.learn(event)
    except (KeyError, TypeError) as error:
        raise foreign_event(path, event, error) from error


def _span(event: Event, row: RowKey) -> Span:
    args = dict(event["args"])
    start_s, end_s = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
    role, step = args.pop("role"), args.pop("step", None)
    if not (step is None or isinstance(step, int)):
        raise TypeError(f"step {step!r} is no whole number")
    name, phase = str(event["name"]), str(event["cat"])
    return Span(name, phase, row.rank, row.node, str(role), start_s, end_s, row.pool, step, args)


def _reading(event: Event, row: RowKey) -> Reading:
    time_s, value = event["ts"] / 1e6, float(event["args"]["value"])
    return Reading(str(event["name"]), row.rank, row.node, time_s, value, row.pool)


def _interval_us(span: Span, ahead_s: float) -> tuple[int, int]:
    """Start and end. Both are rounded, so that bars that nest or touch still do."""
    if not (math.isfinite(span.start_s) and math.isfinite(span.end_s)):
        raise DataError(
            f"span {span.name!r} of {span.row} lasts from {span.start_s} to {span.end_s}; give finite seconds since"
            " the epoch"
        )
    start_us = round((span.start_s - ahead_s) * 1e6)
    return start_us, max(start_us, round((span.end_s - ahead_s) * 1e6))


def _moment_us(reading: Reading, ahead_s: float) -> int:
    if not (math.isfinite(reading.time_s) and math.isfinite(reading.value)):
        raise DataError(
            f"reading {reading.name!r} of {reading.row} is {reading.value} at {reading.time_s}; give finite numbers"
        )
    return round((reading.time_s - ahead_s) * 1e6)


def _arguments(span: Span) -> dict[str, PlainValue]:
    if clash := span.args.keys() & {"role", "step"}:
        raise DataError(
            f"span {span.name!r} has an argument {min(clash)!r}, which is a field of spans; rename the argument"
        )
    return {"role": span.role} | ({} if span.step is None else {"step": span.step}) | dict(span.args)
