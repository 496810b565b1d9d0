"""Human-readable bytes, seconds and tables of figures, in ASCII."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float) -> str:
    """Return bytes in binary units with one decimal: 1536 -> "1.5 KiB", 0 -> "0 B"."""
    if not math.isfinite(num_bytes):
        return str(num_bytes)
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    if round(size) < 1024:
        return f"{sign}{round(size)} B"
    size /= 1024
    units = iter(_BYTE_UNITS[1:])
    unit = next(units)
    # 1023.96 would print as 1024.0.
    while round(size, 1) >= 1024 and unit != _BYTE_UNITS[-1]:
        size, unit = size / 1024, next(units)
    return f"{sign}{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration with about three digits: "4 ms", "1.25 s", "48.3 s", "2 min 05 s", "1 h 02 min"."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if round(seconds * 1000) < 100:
        return f"{round(seconds * 1000)} ms"
    if round(seconds, 2) < 10:
        return f"{seconds:.2f} s"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    hours, rest_min = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest_min:02d} min"


def cell(name: str, value: Any) -> str:
    """Return the text of the figure `name`: bytes and seconds with units, shares in percent, "-" for None."""
    if value is None:
        return "-"
    if "_over_" in name:
        return f"{value:.2f}"
    if name.endswith("_per_s"):
        return f"{value:,.0f}"
    if "bytes" in name:
        return format_bytes(value)
    if name.endswith("_s") or "seconds" in name:
        return format_seconds(value)
    if name.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """Return the lines of a table of the figures that `columns` names, each with its heading, from left to right."""
    return aligned([list(columns.values()), *([cell(name, row[name]) for name in columns] for row in rows)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if index == 0 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
