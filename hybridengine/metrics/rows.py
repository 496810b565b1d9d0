"""Rows of metrics.jsonl as a run has written them: one per step. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from hybridengine.errors import DataError, UnreadableError
from hybridengine.metrics.keys import STEP
from hybridengine.reading import check_regular, parse_json

METRICS_FILE = "metrics.jsonl"
LARGEST = 2**63
"""Beyond every step and count; an integer of hundreds of digits is no float."""

Row = dict[str, float | int | None]
"""Metric -> value; None where the value was not finite. `step` is always there."""


def read_rows(folder: str | Path) -> list[Row]:
    """All rows of FOLDER/metrics.jsonl in the order written; none where there is no file.

    The unfinished last line of a killed or still running process is left out.

    Raises:
        DataError: it is no regular file, or another line is not a JSON object with a `step`; names the line.
    """
    path = Path(folder) / METRICS_FILE
    try:
        check_regular(path)
    except FileNotFoundError:
        return []
    except UnreadableError as error:
        raise DataError(f"{error}; name the folder of a run") from None
    rows: list[Row] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        row = parse_row(line)
        if row is None and not line.endswith(b"\n"):
            break
        if row is None:
            raise DataError(
                f"{path}:{number}: {line[:80]!r} is not a row, a JSON object with a {STEP!r} from 0 on;"
                " remove or repair the line"
            )
        rows.append(row)
    return rows


def latest_rows(rows: list[Row]) -> list[Row]:
    """One row per step, in order of steps: a row of an earlier step means that the run went back to there."""
    latest: list[Row] = []
    for row in rows:
        while latest and (latest[-1][STEP] or 0) >= (row[STEP] or 0):
            latest.pop()
        latest.append(row)
    return latest


def parse_row(line: bytes) -> Row | None:
    """The row that a line holds; None where it holds none."""
    try:
        row = parse_json(line)
    except UnreadableError:
        return None
    if not isinstance(row, dict) or not is_step(row.get(STEP)):
        return None
    return {key: None if type(value) is int and abs(value) > LARGEST else value for key, value in row.items()}


def is_step(value: object) -> bool:
    """Return True if `value` can be the number of an iteration."""
    return type(value) is int and 0 <= value < LARGEST
