"""Contents of a run's folder, and its report as one self-contained HTML page with embedded images."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from jinja2 import Environment, StrictUndefined

from hybridengine.errors import DataError
from hybridengine.files import check_regular
from hybridengine.formatting import format_seconds
from hybridengine.report import keys
from hybridengine.report.console import held_out_results
from hybridengine.report.figures import FIGURES, draw_figure, draw_timeline
from hybridengine.report.samples import SAMPLES_FOLDER, Sample, read_samples
from hybridengine.report.step_rows import CONFIG_FILE, METRICS_FILE, Row, latest_rows, read_rows
from hybridengine.report.timeline import TIMELINE_FILE, Timeline, read_timeline

TEMPLATE = Path(__file__).with_name("page.html")
MAX_EVALUATIONS = 5
MAX_RESPONSES = 12
"""Largest number of samples per evaluation on the page."""
ARROW = " \N{RIGHTWARDS ARROW} "

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
    """Return the contents of a run's folder, with notes on files that are missing or cannot be read; DataError if it has
    no files of a run, or its metrics are damaged."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name the folder of a run, such as runs/arithmetic")
    sample_files = sorted((folder / SAMPLES_FOLDER).glob("*.jsonl"))
    names = (METRICS_FILE, TIMELINE_FILE, CONFIG_FILE)
    files = [*(folder / name for name in names), *sample_files]
    metrics, timeline_file, config_file = files[:3]
    sources = tuple(file for file in files if file.exists())
    if not sources:
        raise DataError(
            f"{folder} has no {METRICS_FILE}, {TIMELINE_FILE}, {CONFIG_FILE} or {SAMPLES_FOLDER}/*.jsonl; name the"
            " folder of a run, such as runs/arithmetic"
        )
    notes = {file.name: [f"The run has no {file.name}."] for file in files[:3] if file not in sources}
    if not sample_files:
        notes[f"{SAMPLES_FOLDER}/*.jsonl"] = [f"The run has no {SAMPLES_FOLDER}/*.jsonl."]
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
            reason = "which are no JSON objects with a step and a response"
            notes[name] = [f"{name}: {num_damaged} lines left out, {reason}."]
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


def render_page(run: RunRecord, steps: range | None = None) -> str:
    """Return the HTML of the page, with the timeline of `steps`, by default the last; all text of the run is escaped."""
    drawn = {figure: draw_figure(figure, run.rows) for figure in FIGURES}
    timeline = draw_timeline(run.timeline.spans, steps)
    evaluations = _evaluations(run.samples)
    metrics_notes = list(run.notes.get(METRICS_FILE, ()))
    missing = [one.title for one, drawing in drawn.items() if drawing is None and not one.is_of_some]
    if missing:
        metrics_notes.append(f"The run has no values of: {', '.join(missing)}.")
    notes = {
        "figures": metrics_notes,
        "timeline": run.notes.get(TIMELINE_FILE)
        or ([] if timeline else [f"{TIMELINE_FILE} has no spans{' of these steps' if steps else ' yet'}."]),
        "samples": [
            note for name, some in run.notes.items() if name.startswith(SAMPLES_FOLDER) for note in some
        ],
        "configuration": run.notes.get(CONFIG_FILE, []),
    }
    if not evaluations and not notes["samples"]:
        notes["samples"] = ["The run has written no samples yet."]
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        run=run,
        notes=notes,
        facts=_facts(run.rows),
        figures={figure.title: drawing for figure, drawing in drawn.items() if drawing},
        timeline=timeline,
        evaluations=evaluations,
    )


def _facts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the name and value of a few key figures of the run."""
    facts = [("training steps", str(sum(bool(row[keys.STEP]) for row in rows)))]
    if results := held_out_results(rows):
        ends = [str(results[place]) for place in sorted({0, len(results) - 1})]
        facts.append((results[0].name, ARROW.join(ends)))
    rewards, seconds, rates = (
        [value for row in rows if (value := row.get(key)) is not None]
        for key in (keys.REWARD_MEAN, keys.STEP_S, keys.TOKENS_PER_S)
    )
    if rewards:
        facts.append(("mean reward", f"{rewards[0]:.3g}{ARROW}{rewards[-1]:.3g}"))
    if seconds:
        facts.append(("step, mean", format_seconds(statistics.fmean(seconds))))
    if rates:
        facts.append(("tokens per second, mean", f"{statistics.fmean(rates):,.0f}"))
    return facts


def _evaluations(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of up to `MAX_EVALUATIONS` evaluations of a run by heading, the last one first."""
    by_step: dict[int, list[Sample]] = {}
    for sample in samples:
        by_step.setdefault(sample.step, []).append(sample)
    found = {}
    for step in reversed(spread(sorted(by_step))):
        own = by_step[step]
        scores = [sample.score for sample in own if sample.score is not None]
        mean = f", mean score {sum(scores) / len(scores):.4g}" if scores else ""
        count = f"{MAX_RESPONSES} of {len(own)}" if len(own) > MAX_RESPONSES else str(len(own))
        found[f"Step {step}: {count} responses{mean}"] = own[:MAX_RESPONSES]
    return found


def spread(steps: Sequence[int]) -> list[int]:
    """Return at most `MAX_EVALUATIONS` of the steps, evenly spaced from the first to the last."""
    count = min(len(steps), MAX_EVALUATIONS)
    return [steps[index] for index in np.linspace(0, len(steps) - 1, count).round().astype(int)]
