"""The report's contents, compared with the run's files, and the command with runs that are damaged, empty or missing."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hybridengine.cli import report as command
from hybridengine.cli.main import main
from hybridengine.errors import DataError
from hybridengine.report import page as page_module
from hybridengine.report.figures import FIGURES
from hybridengine.report.page import read_run
from tests.unit.report_runs import CONFIG, write_run

LACKING = "Rows and steps left out, failures, Memory of the rank with the most"
"""Figures for which `write_run` writes no values."""


class PageText(HTMLParser):
    """Text of a page: cells of its table rows, notes, headings, and the values of named facts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.notes: list[str] = []
        self.headings: list[str] = []
        self.facts: list[str] = []
        self._into: list[str] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kinds = dict(attrs).get("class") or ""
        if tag == "tr":
            self.rows.append([])
        self._into = (
            self.rows[-1] if tag in ("td", "th")
            else self.notes if kinds == "note"
            else self.headings if tag in ("h1", "h2", "h3")
            else self.facts if tag in ("dt", "dd")
            else self._into if tag == "div" else None
        )  # fmt: skip
        if self._into is not None and tag != "div":
            self._into.append("")

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into[-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "p", "h1", "h2", "h3", "dt", "dd"):
            self._into = None


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of 24 steps; tests that change it copy it."""
    return write_run(tmp_path_factory.mktemp("runs") / "made-up", num_steps=24)


@pytest.fixture(scope="module")
def page(made_up: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of `made_up`, drawn once."""
    file = tmp_path_factory.mktemp("reports") / "page.html"
    assert main(["report", str(made_up), "--output", str(file)]) == 0
    return file.read_text()


@pytest.fixture
def few_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the first two figures only."""
    monkeypatch.setattr(page_module, "FIGURES", FIGURES[:2])


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs the command and returns its exit status and output."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        status = main(["report", *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


Report = Callable[..., tuple[int, str]]


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_page_has_every_section_and_the_runs_own_numbers(made_up: Path, page: str) -> None:
    """Sums over the run's files in plain loops, compared with the text of the page."""
    text = PageText(page)
    assert [heading for heading in text.headings if heading[0].isupper()] == [
        "Figures", "Timeline", "Samples", "Configuration",
    ]  # fmt: skip
    assert text.headings[0] == "made-up"
    assert text.notes == [f"The run has no values of: {LACKING}."]
    rows = _rows(made_up)[1:]
    generate = sum(row["time/generate_s"] for row in rows) / 24
    said = html.unescape(page)
    assert f"generate {generate:.2f} s, " in said
    edge = sum(row["transfer/actor.generate_sequences->actor.compute_log_probs_bytes"] for row in rows) / 24
    assert f"actor.generate_sequences->actor.compute_log_probs {edge / 2**10:.1f} KiB, " in said
    facts = dict(zip(text.facts[::2], text.facts[1::2], strict=True))
    assert facts["training steps"] == "24"
    assert facts["exact match"] == f"6.2% \N{RIGHTWARDS ARROW} {rows[-1]['eval/exact_match']:.1%}"
    assert facts["step, mean"] == f"{sum(row['time/step_s'] for row in rows) / 24:.2f} s"
    samples = [json.loads(line) for line in (made_up / "samples" / "step-24.jsonl").read_text().splitlines()]
    shown = [row for row in text.rows if len(row) == 4 and row[0].startswith("What is")]
    assert shown[0] == [
        samples[0]["prompt"],
        samples[0]["response"],
        samples[0]["answer"],
        f"{samples[0]['score']:g}",
    ]
    assert CONFIG in page


@pytest.mark.usefixtures("few_figures")
def test_the_page_is_written_into_the_run_and_again(report: Report, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=2)
    status, said = report(run)
    assert status == 0
    assert said.startswith(f"written: {run / 'report.html'} (")
    first = (run / "report.html").stat().st_size
    assert report(run)[0] == 0
    assert (run / "report.html").stat().st_size == pytest.approx(first, rel=0.01)


def test_the_page_needs_nothing_from_elsewhere(page: str) -> None:
    assert not re.search(r"<(script|link|iframe)\b|<img\ssrc=(?!\"data:)|@import|url\(", page)
    assert "default-src 'none'" in html.unescape(page)
    assert len(page) < 5e6


# ---- Runs that are missing, empty, damaged or still in progress ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN/none"], "none is not a folder; name the folder of a run"),
        (["RUN/metrics.jsonl"], "metrics.jsonl is not a folder; name the folder of a run"),
        (["RUN/samples"], "samples has no metrics.jsonl, timeline.json, config.yaml or samples/*.jsonl; name the folder"),
        (["RUN", "--output", "RUN"], "run must end in .html; rename it"),
        (["RUN", "--output", "RUN/none/page.html"], "cannot be written (No such file or directory); name a file"),
        (["RUN", "--output", "RUN/metrics.jsonl"], "metrics.jsonl must end in .html; rename it"),
        (["RUN", "--output", "RUN/link.html"], "link.html is what the report reads; name another file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(
    report: Report, tmp_path: Path, arguments: list[str], message: str
) -> None:
    run = write_run(tmp_path / "run", num_steps=2)
    (run / "link.html").symlink_to(run / "samples" / "step-0.jsonl")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    status, said = report(*(text.replace("RUN", str(run)) for text in arguments))
    assert status == 2
    assert message in said
    assert said.count("\n") == 1
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_without_matplotlib_the_error_says_what_to_install(
    made_up: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert report(made_up) == (
        2,
        "hybridengine: hybridengine report needs matplotlib; install hybridengine[plots]\n",
    )


def test_damaged_metrics_are_one_error_that_names_the_line(report: Report, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=4)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    huge = [f'{{"step": 1{"0" * digits}}}' for digits in (400, 5000)]
    for broken in (
        "{broken",
        "[" * 100_000,
        *huge,
        '{"step": 5, "reward/mean": "high"}',
        '{"step": 5, "a": NaN}',
    ):
        (run / "metrics.jsonl").write_text("".join([*lines[:2], broken, "\n", *lines[2:]]))
        status, said = report(run)
        assert status == 2
        assert "metrics.jsonl:3: " in said
        assert "is not a row, a JSON object of finite numbers with a 'step' from 0 on" in said
        assert not (run / "report.html").exists()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert "metrics.jsonl is a folder, not a regular file; name the folder of a run" in report(run)[1]


@pytest.mark.usefixtures("few_figures")
def test_what_is_missing_or_damaged_beside_them_is_said_in_its_section(
    report: Report, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", num_steps=4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "kl/mean": null, "actor/odd": null}\n')
        file.write('{"step": 6, "reward/mea')
    (run / "timeline.json").write_text('[\n{"ph": "X"}\n]\n')
    (run / "config.yaml").unlink()
    (run / "samples" / "step-2.jsonl").write_bytes(
        b'{"step": 2, "response": 7, "score": NaN}\n\xff\n[]\n{"step": 2, "resp'
    )
    (run / "samples" / "step-9.jsonl").mkdir()
    status, said = report(run)
    assert status == 0, said
    page = PageText((run / "report.html").read_text())
    notes = page.notes
    assert notes == [
        *[note for note in notes if note.startswith(str(run / "timeline.json"))],
        "samples/step-2.jsonl: 2 lines left out, which are no JSON objects with a step and a response.",
        f"{run}/samples/step-9.jsonl is a folder, not a regular file.",
        "The run has no config.yaml.",
    ]
    assert ["", "7", "", "-"] in page.rows
    assert any("is not an event that a run writes" in note for note in notes)


def test_a_folder_with_little_says_what_it_lacks(report: Report, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    status, said = report(tmp_path)
    assert status == 0, said
    assert PageText((tmp_path / "report.html").read_text()).notes == [
        f"The run has no values of: {', '.join(one.title for one in FIGURES if not one.is_of_some)}.",
        "The run has no timeline.json.",
        "The run has no samples/*.jsonl.",
        "The run has no config.yaml.",
    ]
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no metrics\.jsonl, timeline\.json"):
        read_run(tmp_path)


def test_a_repeated_step_counts_once_as_written_last(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "a": 1}\n{"step": 1, "a": 5}\n{"step": 2, "a": 3}\n')
    assert read_run(tmp_path).rows == [{"step": 1, "a": 5.0}, {"step": 2, "a": 3.0}]


def test_text_that_no_encoding_has_is_replaced(report: Report, tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "a.jsonl").write_text(
        '{"step": 1, "response": "lone \\ud800 half", "score": 1}\n'
    )
    (tmp_path / "config.yaml").write_bytes(b"name: \xff\n")
    assert report(tmp_path)[0] == 0
    text = (tmp_path / "report.html").read_text()
    assert "lone ? half" in text
    assert "name: \N{REPLACEMENT CHARACTER}" in text
