"""What a run's folder holds: metrics, timeline, samples, configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hybridengine.errors import DataError, UnreadableError, shown
from hybridengine.metrics.keys import STEP
from hybridengine.metrics.rows import METRICS_FILE, Row, is_step, latest_rows, read_rows
from hybridengine.metrics.timeline import TIMELINE_FILE, Timeline, read_timeline
from hybridengine.reading import check_regular, parse_json

SAMPLES_FOLDER = "samples"
CONFIG_FILE = "config.yaml"

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Sample:
    """A response of an evaluation."""

    step: int
    prompt: str
    response: str
    answer: str
    score: float | None
    """None where it was not a finite number."""


@dataclass(frozen=True)
class RunRecord:
    """What could be read of a run."""

    name: str
    rows: list[Row]
    """One per step, in order of steps; every value is a number or None."""
    timeline: Timeline
    samples: list[Sample]
    config: str
    notes: dict[str, list[str]] = field(default_factory=dict)
    """File or folder -> what is missing or damaged there."""
    sources: tuple[Path, ...] = ()
    """Files that were read."""


def read_run(folder: Path) -> RunRecord:
    """What the run's folder holds. What is missing or cannot be read becomes a note.

    Raises:
        DataError: no folder, or one that has nothing of a run; damaged metrics, without which there is no report.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name the folder of a run, such as runs/arithmetic")
    sample_files = sorted((folder / SAMPLES_FOLDER).glob("*.jsonl"))
    files = [folder / METRICS_FILE, folder / TIMELINE_FILE, folder / CONFIG_FILE, *sample_files]
    sources = tuple(file for file in files if file.exists())
    if not sources:
        raise DataError(
            f"{folder} has no {METRICS_FILE}, {TIMELINE_FILE}, {CONFIG_FILE} or {SAMPLES_FOLDER}/*.jsonl; name the"
            " folder of a run, such as runs/arithmetic"
        )
    notes: dict[str, list[str]] = {
        name: [f"The run has no {name}."]
        for name, found in (
            (METRICS_FILE, files[0] in sources),
            (TIMELINE_FILE, files[1] in sources),
            (CONFIG_FILE, files[2] in sources),
            (f"{SAMPLES_FOLDER}/*.jsonl", bool(sample_files)),
        )
        if not found
    }
    try:
        rows = latest_rows(read_rows(folder))
    except OSError as error:
        raise DataError(f"{files[0]} cannot be read ({error.strerror}); make it readable") from error
    timeline = _readable(notes, TIMELINE_FILE, lambda: read_timeline(files[1]), Timeline([], []))
    config = _readable(notes, CONFIG_FILE, lambda: _text(files[2]), "")
    samples: list[Sample] = []
    for file in sample_files:
        name = f"{SAMPLES_FOLDER}/{file.name}"
        samples += _readable(notes, name, lambda file=file, name=name: list(_samples(file, name, notes)), [])
    samples.sort(key=lambda sample: sample.step)
    rows = [_numbers_only(row, notes) for row in rows]
    return RunRecord(folder.resolve().name, rows, timeline, samples, config, notes, sources)


def _readable(notes: dict[str, list[str]], name: str, read: Callable[[], _Value], default: _Value) -> _Value:
    """What `read` returns; `default` and a note where it fails."""
    try:
        return read()
    except OSError as error:
        notes.setdefault(name, []).append(f"{name} cannot be read ({error.strerror}).")
    except DataError as error:
        notes.setdefault(name, []).append(f"{error}.")
    return default


def _text(file: Path) -> str:
    if not file.exists():
        return ""
    check_regular(file)
    return file.read_text(encoding="utf-8", errors="replace")


def _samples(file: Path, name: str, notes: dict[str, list[str]]) -> Iterator[Sample]:
    """Samples of a file; lines that are none are counted in a note, an unfinished last one is not."""
    check_regular(file)
    lines = file.read_bytes().splitlines(keepends=True)
    damaged = 0
    for line in lines:
        sample = _sample(line)
        if sample is not None:
            yield sample
        elif line.strip() and (line.endswith(b"\n") or line is not lines[-1]):
            damaged += 1
    if damaged:
        notes.setdefault(name, []).append(
            f"{name}: {damaged} of {len(lines)} lines left out, which are no JSON objects with a step and a response."
        )


def _sample(line: bytes) -> Sample | None:
    try:
        fields = parse_json(line)
    except UnreadableError:
        return None
    if not isinstance(fields, dict) or not is_step(fields.get("step")) or "response" not in fields:
        return None
    texts = (_shown_text(fields.get(name)) for name in ("prompt", "response", "answer"))
    return Sample(fields["step"], *texts, score=finite(fields.get("score")))


def _shown_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def finite(value: object) -> float | None:
    """`value` as a finite float; None where it is none."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _numbers_only(row: Row, notes: dict[str, list[str]]) -> Row:
    """The row without what is neither a number nor null."""
    damaged = {
        key: value for key, value in row.items() if not (value is None or isinstance(value, int | float))
    }
    for key, value in damaged.items():
        notes.setdefault(METRICS_FILE, []).append(
            f"{METRICS_FILE}: {key} of step {row[STEP]} is {shown(value)}, which is not a number, and left out."
        )
    numbers: Row = {key: finite(value) for key, value in row.items() if key not in damaged}
    return numbers | {STEP: row[STEP]}
