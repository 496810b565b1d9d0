"""docs/explanation/reliability.md: every fault in its table names existing tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {file.name: file for file in (ROOT / "tests").rglob("test_*.py")}


def test_every_fault_names_its_tests() -> None:
    page = (ROOT / "docs" / "explanation" / "reliability.md").read_text()
    table = page[page.index("| fault |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) >= 12
    for row in table:
        fault, *_, tests = [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
        named = re.findall(r"`(\w+\.py)` `(\w+)`", tests)
        assert len(named) == tests.count(",") + 1, fault
        for file, name in named:
            assert f"def {name}(" in FILES[file].read_text(), fault
