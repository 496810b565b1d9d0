"""Parts that a section of the page is made of. Every text is plain: the page's template escapes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from hybridengine.metrics.formatting import format_bytes, format_seconds
from hybridengine.metrics.report.run_record import Sample

if TYPE_CHECKING:
    from bokeh.plotting import figure

Unit = Literal["", "bytes", "s"]


@dataclass(frozen=True)
class Chart:
    """A drawing with its caption."""

    title: str
    model: figure
    description: str
    """What the drawing shows, for those who do not see it."""
    note: str = ""
    legend: Mapping[str, str] = field(default_factory=dict)
    """Name -> colour; empty where the title says it all."""


@dataclass(frozen=True)
class ChartGroup:
    """Charts side by side."""

    kind: ClassVar = "charts"
    charts: Sequence[Chart]
    heading: str = ""
    wide: bool = False
    """Whether each takes the page's width."""


@dataclass(frozen=True)
class Table:
    """A table whose columns but the first `num_names` are numbers."""

    kind: ClassVar = "table"
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int = 1


@dataclass(frozen=True)
class SampleTable:
    """Responses of one evaluation."""

    kind: ClassVar = "samples"
    heading: str
    samples: Sequence[Sample]
    is_open: bool
    """Whether the page shows it unfolded."""


@dataclass(frozen=True)
class Listing:
    """Text in a fixed pitch."""

    kind: ClassVar = "listing"
    text: str


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading of its own."""

    anchor: str
    title: str
    blocks: Sequence[ChartGroup | Table | SampleTable | Listing]
    lead: str = ""
    notes: Sequence[str] = ()
    """What is missing, and why."""


def unit_of(key: str) -> Unit:
    """What a metric counts, by its name."""
    if "bytes" in key.rsplit("/", 1)[-1]:
        return "bytes"
    return "s" if key.endswith("_s") and not key.endswith("_per_s") else ""


def format_value(value: float | None, unit: Unit) -> str:
    """A value for people: "1.5 MiB", "2.31 s", "0.01234"; "-" where there is none."""
    if value is None or math.isnan(value):
        return "-"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e15 and value.is_integer() else f"{value:.4g}"
