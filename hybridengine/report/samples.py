"""Responses of an evaluation, as lines of JSON, as a Markdown table, and as a table in the terminal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from hybridengine.files import writing
from hybridengine.report.step_rows import is_step, json_lines

SAMPLES_FOLDER = "samples"
MAX_CHARACTERS = 500
"""Largest number of characters of a text in a table; the lines of JSON have the full text."""
HEADINGS = ("prompt", "response", "answer", "score")
NEWLINE = "\u21b5"


@dataclass(frozen=True)
class Sample:
    """Response of an evaluation."""

    step: int
    prompt: str
    response: str
    answer: str
    score: float | None
    """Score of the response; None if it was not finite."""


def write_samples(folder: Path, step: int, samples: Sequence[Sample]) -> None:
    """Append the samples to FOLDER/evaluation.jsonl, and write FOLDER/evaluation-STEP.md; may raise OutputError."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
        with (folder / "evaluation.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(sample)) + "\n" for sample in samples)
        (folder / f"evaluation-{step}.md").write_text(markdown_table(step, samples), encoding="utf-8")


def read_samples(file: Path) -> tuple[list[Sample], int]:
    """Return the samples of a regular file, and the number of damaged lines; an unfinished last line is ignored."""
    values = [value for line, value in json_lines(file) if line.strip()]
    samples = [
        Sample(
            value["step"],
            *(str(value.get(name) or "") for name in ("prompt", "response", "answer")),
            score=_finite(value.get("score")),
        )
        for value in values
        if isinstance(value, dict) and is_step(value.get("step")) and "response" in value
    ]
    return samples, len(values) - len(samples)


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def markdown_table(step: int, samples: Sequence[Sample]) -> str:
    """Return the samples as a Markdown table with verbatim texts in code spans and aligned columns."""
    scores = [sample.score for sample in samples if sample.score is not None]
    mean = f", mean score {sum(scores) / len(scores):.3f}" if scores else ""
    rows = [HEADINGS, *([*map(_code, texts), score] for *texts, score in map(_cells, samples))]
    widths = [max(3, *map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"| {' | '.join(set_cell_size(text, width) for text, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    table = "\n".join(lines)
    return f"# Evaluation after step {step}\n\n{len(samples)} responses{mean}.\n\n{table}\n"


def terminal_table(step: int, samples: Sequence[Sample]) -> Table:
    """Return the samples as a table of one line each, cut at the width of the terminal."""
    table = Table(title=f"after step {step}", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for heading in HEADINGS:
        is_score = heading == "score"
        table.add_column(heading, no_wrap=is_score, justify="right" if is_score else "left")
    for sample in samples:
        table.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in _cells(sample)))
    return table


def _cells(sample: Sample) -> list[str]:
    texts = (sample.prompt, sample.response, sample.answer)
    return [*map(_cut, texts), "-" if sample.score is None else f"{sample.score:.3f}"]


def printable(text: str) -> str:
    """Return the text as one line: line ends become arrows, control characters are escaped."""
    lines = text.replace("\r\n", "\n").replace("\n", NEWLINE)
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in lines
    )


def _cut(text: str) -> str:
    """Return the printable text, cut to `MAX_CHARACTERS`, with the number of omitted characters."""
    rest = len(text) - MAX_CHARACTERS
    return printable(text) if rest <= 0 else f"{printable(text[:MAX_CHARACTERS])}... ({rest} more)"


def _code(text: str) -> str:
    """Return the text as a code span for a table cell, with a long enough fence and escaped bars."""
    if not text.strip():
        return ""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    padding = " " if "`" in (text[0], text[-1]) or " " == text[0] == text[-1] else ""
    return fence + padding + text.replace("|", "\\|") + padding + fence
