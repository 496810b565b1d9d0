"""Text of figures and tables of them; the name of a figure determines its unit and format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridengine.formatting import format_bytes, format_seconds


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
    """Return the lines of a table of figures.

    Args:
        columns: heading of each figure, by the figure's name, from left to right.
    """
    return aligned([list(columns.values()), *([cell(name, row[name]) for name in columns] for row in rows)])


def span(seconds: Sequence[float]) -> str:
    """Return the shortest and the longest duration as text: "10 ms to 30 ms"."""
    return f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))}"


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
