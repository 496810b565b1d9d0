"""Samples of an evaluation as tables: verbatim in Markdown, harmless and shortened in a terminal."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console

from hybridengine.report.page import read_run
from hybridengine.report.samples import (
    MAX_CHARACTERS,
    Sample,
    markdown_table,
    printable,
    terminal_table,
    write_samples,
)

TEXTS = st.text(
    st.one_of(st.sampled_from("`|\\ \n\r\t<>&*_[]#~-:!x1\x1b\x00\u2028é漢😀"), st.characters(codec="utf-8")),
    max_size=30,
)


def _sample(prompt: str, response: str = "r", answer: str = "a", score: float | None = 1.0) -> Sample:
    return Sample(7, prompt, response, answer, score)


def _cells(markdown: str) -> list[list[str]]:
    """Return the cells of the table's rows as another program reads them: the text of code spans, or else of the cell."""
    rendered = MarkdownIt("commonmark").enable("table").render(markdown)
    body = rendered.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]
    return [
        [html.unescape(re.sub(r"^<code>(.*)</code>$", r"\1", cell, flags=re.DOTALL)) for cell in row]
        for row in cells
    ]


@settings(deadline=None, max_examples=100)
@given(texts=st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=4))
def test_a_markdown_reader_sees_every_text_word_for_word(texts: list[tuple[str, str, str]]) -> None:
    table = markdown_table(7, [_sample(*three, score=0.5) for three in texts])
    expected = [
        [*(shown if (shown := printable(text)).strip() else "" for text in three), "0.500"] for three in texts
    ]
    assert _cells(table) == expected


@given(text=st.text())
def test_no_text_breaks_a_line_or_commands_a_terminal(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1
    plain = "".join(character for character in text if character.isprintable())
    rest = iter(shown)
    assert all(character in rest for character in plain), "what can be printed is there, in its order"


def test_the_table_reads_well_as_it_is() -> None:
    samples = [_sample("3 + 4 =", "7", "7"), _sample("1 - 9 =\n", "8 | 9", "-8", None)]
    lines = markdown_table(20, samples).splitlines()
    assert lines[0] == "# Evaluation after step 20"
    assert lines[2] == "2 responses, mean score 1.000."
    assert len({len(line) for line in lines[4:]}) == 1, "columns are aligned"
    assert re.sub(" +", " ", lines[6]) == "| `3 + 4 =` | `7` | `7` | 1.000 |"
    assert re.sub(" +", " ", lines[7]) == "| `1 - 9 =\u21b5` | `8 \\| 9` | `-8` | - |"


def test_a_long_text_is_cut_and_says_by_how_much() -> None:
    (row,) = _cells(markdown_table(1, [_sample("x" * (MAX_CHARACTERS + 17))]))
    assert row[0] == "x" * MAX_CHARACTERS + "... (17 more)"


def test_files_of_two_evaluations(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    write_samples(folder, 0, [Sample(0, "p\x1b[2J", "wrong", "a", None)])
    write_samples(folder, 10, [Sample(10, "p" * 900, "right", "a", 1.0)])
    assert [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()] == [
        {"step": 0, "prompt": "p\x1b[2J", "response": "wrong", "answer": "a", "score": None},
        {"step": 10, "prompt": "p" * 900, "response": "right", "answer": "a", "score": 1.0},
    ]
    assert [sample.score for sample in read_run(tmp_path).samples] == [None, 1.0], "the report reads them"
    assert [row[:2] for row in _cells((folder / "evaluation-0.md").read_text())] == [["p\\x1b[2J", "wrong"]]
    assert [row[1] for row in _cells((folder / "evaluation-10.md").read_text())] == ["right"]


def test_the_terminal_gets_a_line_each_at_any_width() -> None:
    samples = [
        _sample("short", "r\x1b]0;title\x07" + "r" * 300, "漢字" * 40, 0.25),
        _sample("[bold]no markup[/bold]", "", "", None),
    ]
    for width in (40, 60, 80, 200):
        stream = io.StringIO()
        console = Console(file=stream, width=width, force_terminal=True, color_system=None, _environ={})
        console.print(terminal_table(7, samples))
        lines = [line for line in stream.getvalue().splitlines() if line.strip()]
        assert all(cell_len(line) <= width for line in lines)
        assert "\x1b" not in "".join(lines)
        assert lines[-2].rstrip().endswith("0.250")
        assert lines[-1].rstrip().endswith("-")
        assert len(lines) == 5  # title, headings, rule, two samples
        if width == 200:
            assert "[bold]no markup[/bold]" in lines[-1]
            assert "r\\x1b]0;title\\x07rrr" in lines[-2]
