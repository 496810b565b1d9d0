"""Contents of a run's folder: metrics, timeline, samples, configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hybridengine.errors import DataError
from hybridengine.files import check_regular
from hybridengine.report.samples import SAMPLES_FOLDER, Sample, read_samples
from hybridengine.report.step_rows import METRICS_FILE, Row, latest_rows, read_rows
from hybridengine.report.timeline import TIMELINE_FILE, Timeline, read_timeline

CONFIG_FILE = "config.yaml"

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class RunRecord:
    """Readable contents of a run's folder."""

    name: str
    rows: list[Row]
    """One row per step, in order of steps; every value is a number or None."""
    timeline: Timeline
    samples: list[Sample]
    config: str
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Missing or damaged contents, by file or folder."""
    sources: tuple[Path, ...] = ()
    """Files that were read."""


def read_run(folder: Path) -> RunRecord:
    """Return the contents of a run's folder, with notes on files that are missing or cannot be read.

    Raises:
        DataError: `folder` is not a folder, has no files of a run, or its metrics are damaged.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name the folder of a run, such as runs/arithmetic")
    sample_files = sorted((folder / SAMPLES_FOLDER).glob("*.jsonl"))
    metrics, timeline_file, config_file = (
        folder / name for name in (METRICS_FILE, TIMELINE_FILE, CONFIG_FILE)
    )
    files = [metrics, timeline_file, config_file, *sample_files]
    sources = tuple(file for file in files if file.exists())
    if not sources:
        raise DataError(
            f"{folder} has no {METRICS_FILE}, {TIMELINE_FILE}, {CONFIG_FILE} or {SAMPLES_FOLDER}/*.jsonl; name the"
            " folder of a run, such as runs/arithmetic"
        )
    missing = [file.name for file in files[:3] if file not in sources]
    missing += [] if sample_files else [f"{SAMPLES_FOLDER}/*.jsonl"]
    notes = {name: [f"The run has no {name}."] for name in missing}
    try:
        rows = latest_rows(read_rows(folder))
    except OSError as error:
        raise DataError(f"{metrics} cannot be read ({error.strerror}); make it readable") from error
    timeline = _readable(notes, TIMELINE_FILE, lambda: read_timeline(timeline_file), Timeline([], []))
    config = _readable(notes, CONFIG_FILE, lambda: _text(config_file), "")
    samples: list[Sample] = []
    for file in sample_files:
        name = f"{SAMPLES_FOLDER}/{file.name}"
        found, num_damaged = _readable(notes, name, lambda file=file: read_samples(file), ([], 0))
        samples += found
        if num_damaged:
            notes[name] = [
                f"{name}: {num_damaged} lines left out, which are no JSON objects with a step and a response."
            ]
    samples.sort(key=lambda sample: sample.step)
    return RunRecord(folder.resolve().name, rows, timeline, samples, config, notes, sources)


def _readable(notes: dict[str, list[str]], name: str, read: Callable[[], _Value], default: _Value) -> _Value:
    """Return the result of `read`; if it fails, add a note and return `default`."""
    try:
        return read()
    except OSError as error:
        notes[name] = [f"{name} cannot be read ({error.strerror})."]
    except DataError as error:
        notes[name] = [f"{error}."]
    return default


def _text(file: Path) -> str:
    if not file.exists():
        return ""
    check_regular(file)
    return file.read_text(encoding="utf-8", errors="replace")
