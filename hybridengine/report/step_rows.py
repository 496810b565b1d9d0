"""Rows of metrics.jsonl, one per step. Does not need torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from hybridengine.errors import DataError, UnreadableError
from hybridengine.files import check_regular, parse_json
from hybridengine.report.keys import STEP

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
"""Configuration of a run, in the same folder."""
LARGEST = 2**127
"""Upper bound of the values of metrics."""

Row = dict[str, float | int | None]
"""Value of each metric, None if it was not finite. Always has `step`."""


def json_lines(path: Path) -> Iterator[tuple[bytes, object]]:
    """Yield each complete line of a file with its value, None if it is not JSON; errors are those of `check_regular`."""
    check_regular(path)
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            value = parse_json(line)
        except UnreadableError:
            if not line.endswith(b"\n"):
                return
            value = None
        yield line, value


def read_rows(folder: str | Path) -> list[Row]:
    """Return all rows of FOLDER/metrics.jsonl as written, none without a file; DataError for a line that is not a row."""
    path = Path(folder) / METRICS_FILE
    rows: list[Row] = []
    try:
        for number, (line, value) in enumerate(json_lines(path), start=1):
            if not _is_row(value):
                raise DataError(
                    f"{path}:{number}: {line[:80]!r} is not a row, a JSON object of finite numbers with a {STEP!r}"
                    " from 0 on; remove or repair the line"
                )
            rows.append(value)
    except FileNotFoundError:
        return []
    except UnreadableError as error:
        raise DataError(f"{error}; name the folder of a run") from None
    return rows


def latest_rows(rows: Sequence[Row]) -> list[Row]:
    """Return one row per step, in order of steps; a row replaces all earlier rows of its step and later steps."""
    latest: list[Row] = []
    for row in rows:
        while latest and (latest[-1][STEP] or 0) >= (row[STEP] or 0):
            latest.pop()
        latest.append(row)
    return latest


def _is_row(value: object) -> TypeGuard[Row]:
    if not isinstance(value, dict) or not is_step(value.get(STEP)):
        return False
    return all(one is None or (isinstance(one, int | float) and abs(one) < LARGEST) for one in value.values())


def is_step(value: object) -> bool:
    """Return True if `value` can be the number of an iteration."""
    return type(value) is int and 0 <= value < LARGEST
