"""Rows of metrics.jsonl as a run has written them: one per step. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from hybridengine.errors import DataError, UnreadableError
from hybridengine.metrics.keys import STEP
from hybridengine.reading import check_regular, parse_json

METRICS_FILE = "metrics.jsonl"
LARGEST = 2**63
"""Beyond every step and count; an integer of hundreds of digits is no float."""

Row = dict[str, float | int | None]
"""Metric -> value; None where the value was not finite. `step` is always there."""


def json_lines(path: Path) -> Iterator[tuple[bytes, object]]:
    """Yield each line of a file with its value, None if it is not JSON; an unfinished last line is skipped.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: it is not a regular file.
    """
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
    """Return all rows of FOLDER/metrics.jsonl in the order written; none if there is no file.

    The unfinished last line of a killed or still running process is skipped.

    Raises:
        DataError: it is not a regular file, or another line is not a JSON object with a `step`; names the line.
    """
    path = Path(folder) / METRICS_FILE
    rows: list[Row] = []
    try:
        for number, (line, value) in enumerate(json_lines(path), start=1):
            row = _row(value)
            if row is None:
                raise DataError(
                    f"{path}:{number}: {line[:80]!r} is not a row, a JSON object with a {STEP!r} from 0 on;"
                    " remove or repair the line"
                )
            rows.append(row)
    except FileNotFoundError:
        return []
    except UnreadableError as error:
        raise DataError(f"{error}; name the folder of a run") from None
    return rows


def latest_rows(rows: list[Row]) -> list[Row]:
    """Return one row per step, in order of steps: a row of an earlier step means that the run went back to there."""
    latest: list[Row] = []
    for row in rows:
        while latest and (latest[-1][STEP] or 0) >= (row[STEP] or 0):
            latest.pop()
        latest.append(row)
    return latest


def _row(value: object) -> Row | None:
    if not isinstance(value, dict) or not is_step(value.get(STEP)):
        return None
    return {key: None if type(one) is int and abs(one) > LARGEST else one for key, one in value.items()}


def is_step(value: object) -> bool:
    """Return True if `value` can be the number of an iteration."""
    return type(value) is int and 0 <= value < LARGEST


def finite(value: object) -> float | None:
    """Return `value` as a finite float; None if it is none."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def number(value: float | None) -> float:
    """Return a value of a row as a number: NaN for None."""
    return math.nan if value is None else float(value)
