"""docs/reliability.md: every fault of its table names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {file.name: file for file in (ROOT / "tests").rglob("test_*.py")}


def test_every_fault_names_its_test() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    table = page[page.index("| fault |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) >= 12
    for row in table:
        fault, *_, test = [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
        file, name = re.findall(r"`(\w+(?:\.py)?)`", test)
        assert f"def {name}(" in FILES[file].read_text(), fault
