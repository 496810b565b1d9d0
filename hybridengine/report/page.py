"""A run's report as one self-contained HTML page with embedded images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined

from hybridengine.formatting import format_seconds
from hybridengine.report import keys
from hybridengine.report.console import held_out_results
from hybridengine.report.figures import FIGURES, draw_figure, draw_timeline
from hybridengine.report.run_record import CONFIG_FILE, RunRecord
from hybridengine.report.samples import SAMPLES_FOLDER, Sample
from hybridengine.report.step_rows import METRICS_FILE, Row
from hybridengine.report.timeline import TIMELINE_FILE

TEMPLATE = Path(__file__).with_name("page.html")
MAX_EVALUATIONS = 5
MAX_RESPONSES = 12
"""Largest number of samples per evaluation on the page."""
ARROW = " \N{RIGHTWARDS ARROW} "


@dataclass(frozen=True)
class Evaluation:
    """Responses of one evaluation."""

    heading: str
    samples: Sequence[Sample]


def render_page(run: RunRecord) -> str:
    """Return the HTML of the page; all text from the run is escaped."""
    drawn = {figure.title: draw_figure(figure, run.rows) for figure in FIGURES}
    timeline = draw_timeline(run.timeline.spans)
    evaluations = _evaluations(run.samples)
    metrics_notes = list(run.notes.get(METRICS_FILE, ()))
    if missing := [title for title, drawing in drawn.items() if drawing is None]:
        metrics_notes.append(f"The run has no values of: {', '.join(missing)}.")
    notes = {
        "figures": metrics_notes,
        "timeline": run.notes.get(TIMELINE_FILE)
        or ([] if timeline else [f"{TIMELINE_FILE} has no spans yet."]),
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
        figures={title: drawing for title, drawing in drawn.items() if drawing},
        timeline=timeline,
        evaluations=evaluations,
    )


def _facts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the name and value of a few key figures of the run."""
    facts = [("training steps", str(sum(bool(row[keys.STEP]) for row in rows)))]
    if results := held_out_results(rows):
        ends = [str(results[place]) for place in sorted({0, len(results) - 1})]
        facts.append((results[0].name, ARROW.join(ends)))
    if rewards := _known(rows, keys.REWARD_MEAN):
        facts.append(("mean reward", f"{rewards[0]:.3g}{ARROW}{rewards[-1]:.3g}"))
    if seconds := _known(rows, keys.STEP_S):
        facts.append(("step, mean", format_seconds(sum(seconds) / len(seconds))))
    if rates := _known(rows, keys.TOKENS_PER_S):
        facts.append(("tokens per second, mean", f"{sum(rates) / len(rates):,.0f}"))
    return facts


def _known(rows: Sequence[Row], key: str) -> list[float]:
    return [value for row in rows if (value := row.get(key)) is not None]


def _evaluations(samples: Sequence[Sample]) -> list[Evaluation]:
    """Return up to `MAX_EVALUATIONS` evaluations of a run, the last one first."""
    by_step: dict[int, list[Sample]] = {}
    for sample in samples:
        by_step.setdefault(sample.step, []).append(sample)
    found = []
    for step in reversed(spread(sorted(by_step))):
        own = by_step[step]
        scores = [sample.score for sample in own if sample.score is not None]
        mean = f", mean score {sum(scores) / len(scores):.4g}" if scores else ""
        count = f"{MAX_RESPONSES} of {len(own)}" if len(own) > MAX_RESPONSES else str(len(own))
        found.append(Evaluation(f"Step {step}: {count} responses{mean}", own[:MAX_RESPONSES]))
    return found


def spread(steps: Sequence[int]) -> list[int]:
    """Return at most `MAX_EVALUATIONS` of the steps, evenly spaced from the first to the last."""
    count = min(len(steps), MAX_EVALUATIONS)
    return [steps[index] for index in np.linspace(0, len(steps) - 1, count).round().astype(int)]
