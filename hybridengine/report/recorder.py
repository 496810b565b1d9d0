"""Recorder of one row per step, in metrics.jsonl (one JSON object per line) and TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import operator
import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from hybridengine.errors import DataError
from hybridengine.files import writing
from hybridengine.report.keys import STEP
from hybridengine.report.step_rows import METRICS_FILE, Row

TENSORBOARD_FOLDER = "tensorboard"

_logger = logging.getLogger(__name__)


class MetricsRecorder:
    """Appends rows to FOLDER/metrics.jsonl and FOLDER/tensorboard.

    Guarantees:
        Every row is passed to the operating system before `record` returns: a killed process loses none.
        A step that is recorded again, by a resumed run, gets a second row (see `latest_rows`).
        A value that is not finite is null in the row, absent from TensorBoard, and logged as a warning.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            _cut_last_line(self.folder / METRICS_FILE)
            self._file = (self.folder / METRICS_FILE).open("a", encoding="utf-8")
            self._tensorboard = SummaryWriter(str(self.folder / TENSORBOARD_FOLDER))

    def record(self, step: SupportsIndex, metrics: Mapping[str, SupportsFloat]) -> Row:
        """Write the row of `step` (0 is the state before training), and return it as written. Integers stay integers.

        Raises:
            DataError: a value is not a number, or `step` is among the metrics.
            OutputError: the files cannot be written.
        """
        if STEP in metrics:
            raise DataError(f"metric {STEP!r}={metrics[STEP]!r} is the row's own key; pass it as `step`")
        number = operator.index(step)
        row: Row = {STEP: number}
        row |= {key: _finite_number(key, value, number) for key, value in metrics.items()}
        with writing(self.folder / METRICS_FILE):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        with writing(self.folder / TENSORBOARD_FOLDER):
            for key, value in row.items():
                if key != STEP and value is not None:
                    self._tensorboard.add_scalar(key, value, global_step=number)
            self._tensorboard.flush()
        return row

    def close(self) -> None:
        """Close both files; a second call does nothing."""
        with writing(self.folder / METRICS_FILE):
            self._file.close()
        with writing(self.folder / TENSORBOARD_FOLDER):
            self._tensorboard.close()


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


def _cut_last_line(path: Path) -> None:
    """Remove an unfinished last line of metrics.jsonl; a resumed run repeats its step."""
    content = path.read_bytes() if path.exists() else b""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
        _logger.warning("%s ended in an unfinished line of %d bytes; cut it off", path, len(content) - end)
