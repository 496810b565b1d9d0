"""One row per step: to metrics.jsonl, a JSON object per line, and the same scalars to TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import operator
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat, SupportsIndex

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from hybridengine.errors import DataError
from hybridengine.metrics.keys import STEP

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
TORN_FILE = "metrics.torn.txt"
"""Where the unfinished last line of a killed run goes, so that every line of metrics.jsonl is a row."""

Row = dict[str, float | int | None]
"""Metric -> value; None where the value was not finite. `step` is always there."""

_logger = logging.getLogger(__name__)


class MetricsRecorder:
    """Appends rows to FOLDER/metrics.jsonl and FOLDER/tensorboard; a context manager.

    Guarantees:
        Every row is handed to the operating system before `record` returns: a killed process loses none.
        Opening a folder that has rows appends to them. A step that is recorded again (a run resumed from an
        older checkpoint) gets a second row; `latest_rows` takes the later one.
        A value that is not finite is written as null, because JSON has no NaN, left out of TensorBoard, and
        logged as a warning: a bad diagnostic must not end a run, and must not go unseen.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        _end_last_line(self.folder)
        self._file = (self.folder / METRICS_FILE).open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(self.folder / TENSORBOARD_FOLDER))

    def record(self, step: SupportsIndex, metrics: Mapping[str, SupportsFloat]) -> Row:
        """Write the row of `step` and return it as it was written.

        Args:
            step: the step's number; 0 is the state before training.
            metrics: metric -> Python number, NumPy scalar or 0-dim tensor. Integers of Python and
                NumPy (bytes) stay integers.

        Raises:
            DataError: a value is not a number, or the key `step` is among the metrics.
        """
        if STEP in metrics:
            raise DataError(f"metric {STEP!r}={metrics[STEP]!r} is the row's own key; pass it as `step`")
        number = operator.index(step)
        row: Row = {STEP: number}
        for key, value in metrics.items():
            row[key] = _finite_number(key, value, number)
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        for key, value in row.items():
            if key != STEP and value is not None:
                self._tensorboard.add_scalar(key, value, global_step=number)
        self._tensorboard.flush()
        return row

    def close(self) -> None:
        """Close both files; a second call does nothing."""
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_rows(folder: str | Path) -> list[Row]:
    """All rows of FOLDER/metrics.jsonl in the order written; none where there is no file.

    The unfinished last line of a killed or still running process is left out.

    Raises:
        DataError: another line is not a JSON object with a `step`; names the line.
    """
    path = Path(folder) / METRICS_FILE
    if not path.exists():
        return []
    rows: list[Row] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        row = _parse_row(line)
        if row is None and not line.endswith(b"\n"):
            break
        if row is None:
            raise DataError(
                f"{path}:{number}: {line[:80]!r} is not a row, a JSON object with an integer {STEP!r};"
                " remove or repair the line"
            )
        rows.append(row)
    return rows


def latest_rows(rows: list[Row]) -> list[Row]:
    """One row per step, the last one written, in order of steps."""
    by_step = {row[STEP]: row for row in rows}
    return [by_step[step] for step in sorted(by_step, key=lambda step: step or 0)]


def _parse_row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get(STEP), int) else None


def _finite_number(key: str, value: Any, step: int) -> float | int | None:
    if isinstance(value, Integral):
        return int(value)
    try:
        if isinstance(value, str):
            raise TypeError("a string is not a number")
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"metric {key!r}={value!r} must be one number; record a scalar ({error})") from error
    if not math.isfinite(number):
        _logger.warning("step %d: metric %s is %s; written as null", step, key, number)
        return None
    return number


def _end_last_line(folder: Path) -> None:
    """Make metrics.jsonl end with a newline: complete a whole last row, set an unfinished one aside."""
    path = folder / METRICS_FILE
    if not path.exists():
        return
    content = path.read_bytes()
    tail = content[content.rfind(b"\n") + 1 :]
    if not tail:
        return
    if _parse_row(tail) is not None:
        with open(path, "ab") as file:
            file.write(b"\n")
        return
    with open(folder / TORN_FILE, "ab") as file:
        file.write(tail + b"\n")
    with open(path, "r+b") as file:
        file.truncate(len(content) - len(tail))
    _logger.warning("%s ended in an unfinished line of %d bytes; moved it to %s", path, len(tail), TORN_FILE)
