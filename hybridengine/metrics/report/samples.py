"""Section: prompts, responses and scores of some evaluations."""

from __future__ import annotations

from collections.abc import Sequence

from hybridengine.metrics.report.blocks import SampleTable, Section, format_value
from hybridengine.metrics.report.run_record import SAMPLES_FOLDER, RunRecord, Sample

MAX_EVALUATIONS = 5
MAX_RESPONSES = 12
"""Of each evaluation."""


def samples_section(run: RunRecord) -> Section:
    """The last evaluation unfolded, the first and some between folded."""
    by_step: dict[int, list[Sample]] = {}
    for sample in run.samples:
        by_step.setdefault(sample.step, []).append(sample)
    steps = sorted(by_step)
    blocks = [_table(step, by_step[step], is_open=step == steps[-1]) for step in reversed(spread(steps))]
    notes = [note for name, some in run.notes.items() if name.startswith(SAMPLES_FOLDER) for note in some]
    if not blocks and not notes:
        notes = ["The run has written no samples yet."]
    lead = "The model's own words, with what was expected and how they were scored."
    return Section("samples", "Samples", blocks, lead, notes)


def spread(steps: Sequence[int]) -> list[int]:
    """At most `MAX_EVALUATIONS` of the steps, first and last among them, evenly between."""
    if len(steps) <= MAX_EVALUATIONS:
        return list(steps)
    return [
        steps[round(index * (len(steps) - 1) / (MAX_EVALUATIONS - 1))] for index in range(MAX_EVALUATIONS)
    ]


def _table(step: int, samples: Sequence[Sample], is_open: bool) -> SampleTable:
    scores = [sample.score for sample in samples if sample.score is not None]
    mean = f", mean score {format_value(sum(scores) / len(scores), '')}" if scores else ""
    shown = samples[:MAX_RESPONSES]
    count = f"{len(shown)} of {len(samples)}" if len(shown) < len(samples) else f"{len(samples)}"
    return SampleTable(f"Step {step}: {count} responses{mean}", shown, is_open)
