"""Charts of the commands: shared style, file output and grouped bars."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

INK = "#333333"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "legend.frameon": False,
    "svg.hashsalt": "hybridengine",
    "text.parse_math": False,
}
"""Settings of matplotlib: equal charts produce equal SVG files, and dollar signs in names are literal."""

Bars = tuple[str, Sequence[float], Sequence[Sequence[float]] | None]
"""Colour, lengths and, optionally, the error of each length (below, above)."""


@contextlib.contextmanager
def drawing(file: Path, title: str, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure of the given size in inches; on exit, set its title and write it to `file`."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.suptitle(title, fontsize=10)
        figure.savefig(file, dpi=130, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)


def grouped_bars(axes: Axes, labels: Sequence[str], series: Mapping[str, Bars]) -> list[BarContainer]:
    """Draw one bar per series at every label, top to bottom, and return the bars of each series."""
    height = 0.78 / len(series)
    drawn, largest = [], 0.0
    for index, (name, (colour, lengths, extents)) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * height
        places = [place + offset for place in range(len(labels))]
        error = {"xerr": extents, "error_kw": {"ecolor": INK, "elinewidth": 1}} if extents else {}
        drawn.append(axes.barh(places, lengths, 0.94 * height, color=colour, label=name, **error))
        largest = max(largest, *lengths)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, 1.22 * largest or 1.0)
    return drawn


def panel(axes: Axes, title: str, xlabel: str, ylabel: str = "") -> None:
    """Set the title and axis names of a panel; a named y axis begins at 0."""
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    if ylabel:
        axes.set_ylabel(ylabel)
        axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
