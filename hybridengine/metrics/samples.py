"""Responses of an evaluation: as lines of JSON, as a table in a file, and a few of them in the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from hybridengine.metrics.rows import finite, is_step, json_lines
from hybridengine.writing import writing

SAMPLES_FOLDER = "samples"
MAX_CHARACTERS = 500
"""Of a text in a table; the lines of JSON have it whole."""
HEADINGS = ("prompt", "response", "answer", "score")
NEWLINE = "\u21b5"


@dataclass(frozen=True)
class Sample:
    """A response of an evaluation."""

    step: int
    prompt: str
    response: str
    answer: str
    score: float | None
    """None if it was not a finite number."""


def write_samples(folder: Path, step: int, samples: Sequence[Sample]) -> None:
    """Add the samples to FOLDER/evaluation.jsonl, and write them as a table to FOLDER/evaluation-STEP.md.

    Raises:
        OutputError: the disk does not take them.
    """
    with writing(folder):
        folder.mkdir(exist_ok=True)
        with (folder / "evaluation.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(sample)) + "\n" for sample in samples)
        (folder / f"evaluation-{step}.md").write_text(markdown_table(step, samples), encoding="utf-8")


def read_samples(file: Path) -> tuple[list[Sample], int]:
    """Return the samples of a file, and the number of its lines that are none; an unfinished last line does not count.

    Raises:
        UnreadableError: it is not a regular file.
    """
    values = [value for line, value in json_lines(file) if line.strip()]
    samples = [
        Sample(
            value["step"],
            *(_text(value.get(name)) for name in ("prompt", "response", "answer")),
            score=finite(value.get("score")),
        )
        for value in values
        if isinstance(value, dict) and is_step(value.get("step")) and "response" in value
    ]
    return samples, len(values) - len(samples)


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def markdown_table(step: int, samples: Sequence[Sample]) -> str:
    """The samples as Markdown: texts word for word in code spans, columns aligned for those who read it as it is."""
    rows = [
        [str(number), *(_code(_cut(text)) for text in _texts(sample)), _score(sample)]
        for number, sample in enumerate(samples, start=1)
    ]
    headings = ["", *HEADINGS]
    widths = [max(3, *(len(row[place]) for row in [headings, *rows])) for place in range(len(headings))]
    lines = [headings, ["-" * (width - 1) + ":" for width in widths], *rows]
    lines[1][1:4] = ["-" * width for width in widths[1:4]]
    scores = [sample.score for sample in samples if sample.score is not None]
    mean = f", mean score {sum(scores) / len(scores):.3f}" if scores else ""
    table = "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )
    return f"# Evaluation after step {step}\n\n{len(samples)} responses{mean}.\n\n{table}\n"


def terminal_table(step: int, samples: Sequence[Sample]) -> Table:
    """The samples, a line each, cut where the terminal ends."""
    table = Table(title=f"after step {step}", box=box.SIMPLE, title_justify="left", pad_edge=False)
    for heading in HEADINGS[:-1]:
        table.add_column(heading)
    table.add_column(HEADINGS[-1], no_wrap=True, justify="right")
    for sample in samples:
        texts = (Text(_cut(text), no_wrap=True, overflow="ellipsis") for text in _texts(sample))
        table.add_row(*texts, Text(_score(sample)))
    return table


def printable(text: str) -> str:
    """The text in one line: line ends as an arrow, and no character that a terminal would obey."""
    lines = text.replace("\r\n", "\n").replace("\n", NEWLINE)
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in lines
    )


def _texts(sample: Sample) -> tuple[str, str, str]:
    return sample.prompt, sample.response, sample.answer


def _score(sample: Sample) -> str:
    return "-" if sample.score is None else f"{sample.score:.3f}"


def _cut(text: str) -> str:
    """Printable, with the number of the characters that were left out."""
    rest = len(text) - MAX_CHARACTERS
    return printable(text) if rest <= 0 else f"{printable(text[:MAX_CHARACTERS])}... ({rest} more)"


def _code(text: str) -> str:
    """A code span in a cell: fenced by more backticks than it has in a row, bars escaped for the table."""
    if not text.strip():
        return ""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    padding = " " if "`" in (text[0], text[-1]) or " " == text[0] == text[-1] else ""
    return fence + padding + text.replace("|", "\\|") + padding + fence
