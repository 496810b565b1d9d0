"""File of the calls on a server's ranks, from which their time and their number are read."""

from __future__ import annotations

import json
from pathlib import Path

from hybridengine.controller.call_log import CallRecord


class CallFile:
    """Appends a JSON line for each call that has ended; without a file, forgets the calls."""

    def __init__(self, path: str | None) -> None:
        self._file = None if path is None else Path(path).open("a", buffering=1)  # noqa: SIM115

    def __call__(self, record: CallRecord) -> None:
        """Append a line: `call`, `begin_s` and `end_s` since the epoch, and `seconds` on the slowest rank."""
        if self._file is None:
            return
        begins, ends = zip(*record.spans.values(), strict=True)
        line = {"call": str(record), "begin_s": min(begins), "end_s": max(ends), "seconds": record.seconds}
        self._file.write(json.dumps(line) + "\n")
