"""The tables of docs/explanation/resharding.md: they follow the paper's formulas and are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.cli.main import main
from scripts import paper_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "explanation" / "resharding.md"
M_OF = {"7B": 6_738_415_616, "13B": 13_015_864_320, "34B": 33_743_970_304, "70B": 68_976_648_192}


@pytest.fixture(scope="module")
def rows() -> list[paper_table.Row]:
    return paper_table.rows(paper_table.SIZES)


def test_planned_bytes_are_those_of_table_2(rows: list[paper_table.Row]) -> None:
    expected = {"7B": (3 / 8, 1 / 2), "13B": (1 / 8, 1 / 4), "34B": (3 / 16, 1 / 4), "70B": (3 / 32, 1 / 8)}
    for row in rows:
        total = 2 * M_OF[row.model]
        received, peak = expected[row.model]
        assert row.weight_bytes == total
        assert row.cost.received_bytes_max == pytest.approx(received * total, rel=0.01)
        assert row.cost.peak_weight_bytes_max == pytest.approx(peak * total, rel=0.05)
        assert row.cost.redundant_bytes_max == row.cost.extra_bytes_max == 0


def test_least_seconds_of_the_other_methods(rows: list[paper_table.Row]) -> None:
    """Worked out by hand: 300 GB/s inside a machine, 25 GB/s into each of 16; a replica takes 1, 1, 2 and 4 machines."""
    total = {row.model: row.weight_bytes for row in rows}
    expected = {
        "7B": total["7B"] * 7 / 8 / 300e9,
        "13B": total["13B"] * 7 / 8 / 300e9,
        "34B": total["34B"] / 2 / 25e9,
        "70B": total["70B"] * 3 / 4 / 25e9,
    }
    for row in rows:
        assert row.model_parallel_seconds == pytest.approx(expected[row.model])
        assert row.full_seconds == pytest.approx(total[row.model] * 15 / 16 / 25e9)
        assert row.seconds_there >= row.line_rate_seconds


def test_no_generation_size_waits_long_for_the_switch() -> None:
    found = paper_table.rows(paper_table.GENERATION_SIZES)
    assert max(row.seconds_there + row.seconds_back for row in found) < 0.25
    assert [row.cost.received_bytes_max == 0 for row in found] == [False, False, False, True] * 2


def test_the_document_shows_todays_tables() -> None:
    text = DOCUMENT.read_text()
    for table in paper_table.tables():
        assert table in text, (
            f"replace the table of docs/explanation/resharding.md by: python scripts/paper_table.py\n{table}"
        )


def test_the_document_shows_todays_plan(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, block = DOCUMENT.read_text().partition("$ hybridengine reshard plan ")
    command, _, output = block.partition("```")[0].partition("\n\n")
    arguments = command.replace("\\\n", " ").partition(" --plot")[0].split()
    assert main(["reshard", "plan", *arguments]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    assert printed == [line.rstrip() for line in output.strip().splitlines()]
