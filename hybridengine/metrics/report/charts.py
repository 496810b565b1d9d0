"""Drawings: curves, stacked bars over steps, rows of bars over time.

Names of metrics, ranks and phases stay out of what bokeh typesets as text, where dollar signs would be a formula: they
are in the page's captions and legends, and in tooltips, which show them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from bokeh.models import (
    AdaptiveTicker,
    BasicTicker,
    BasicTickFormatter,
    ColumnDataSource,
    DataRange1d,
    DataRenderer,
    FixedTicker,
    HoverTool,
    NumeralTickFormatter,
    PlainText,
    Range1d,
)
from bokeh.plotting import figure

from hybridengine.metrics.report.blocks import Chart, Unit, format_value
from hybridengine.metrics.report.colours import INK, LINE, OTHER

MAX_POINTS = 600
"""Of a curve. A longer one is drawn by the lowest and the highest value of each of half as many stretches."""
MAX_BARS = 120
"""Of stacked bars. More steps are drawn as means of neighbours."""
NUM_MARKED = 60
"""Points of a curve that has each of them marked."""
Line = tuple[Sequence[float], Sequence[float | None]]
"""Places and values of a curve."""

_SMALL_PX, _LARGE_PX, _ROW_PX = 170, 300, 26
_AXIS_FORMS = {"bytes": "0.[0] ib", "s": "0.[000]"}
_TOOLTIP_FORMS: dict[Unit, tuple[Literal["numeral", "printf"], str]] = {
    "": ("printf", "%.6g"),
    "bytes": ("numeral", "0.0 ib"),
    "s": ("printf", "%.4g s"),
}


@dataclass(frozen=True)
class Bar:
    """A bar of `bar_rows`."""

    row: int
    """0 is the uppermost."""
    depth: int
    """Number of bars that it lies in."""
    start_s: float
    end_s: float
    name: str
    phase: str
    details: str


def curve(title: str, unit: Unit, steps: Sequence[float], values: Sequence[float | None]) -> Chart:
    """One metric over steps; values that are None are gaps."""
    return curves(title, unit, {title: (steps, values)}, {title: LINE}, "step", _SMALL_PX)


def curves(
    title: str,
    unit: Unit,
    lines: Mapping[str, Line],
    colours: Mapping[str, str],
    x_name: str,
    height: int = _LARGE_PX,
) -> Chart:
    """Several curves in one drawing: name -> places and values, and its colour."""
    plot = _plot(height, x_name)
    drawn = [_draw_line(plot, name, *line, colours[name]) for name, line in lines.items()]
    form, pattern = _TOOLTIP_FORMS[unit]
    tooltips = [(x_name, "@x{0.[000]}"), ("value", f"@y{{{pattern}}}")]
    if len(lines) > 1:
        tooltips.insert(0, ("", "$name"))
    mode = "vline" if len(lines) == 1 else "mouse"
    plot.add_tools(HoverTool(tooltips=tooltips, formatters={"@y": form}, mode=mode, renderers=drawn))
    _set_y_axis(plot, unit)
    if len(known := {value for _, values in lines.values() for value in values if value is not None}) == 1:
        plot.y_range = _range_around(known.pop())
    legend = {name: colours[name] for name in lines} if len(lines) > 1 else {}
    return Chart(title, plot, _description(lines, unit, x_name), _gap_note(lines), legend)


def stacked_bars(
    title: str,
    unit: Unit,
    steps: Sequence[int],
    parts: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
) -> Chart:
    """A bar per step made of `parts`, name -> a value per step, the first one lowest."""
    plot = _plot(_LARGE_PX, "step")
    per_bar = -(-len(steps) // MAX_BARS)
    bars = plot.vbar(
        x="x", width="width", bottom="bottom", top="top", fill_color="colour", line_color="white", line_width=0.5,
        source=_stack(steps, parts, colours, per_bar),
    )  # fmt: skip
    form, pattern = _TOOLTIP_FORMS[unit]
    tooltips = [("step", "@steps"), ("", "@name"), ("value", f"@value{{{pattern}}}")]
    plot.add_tools(HoverTool(tooltips=tooltips, formatters={"@value": form}, renderers=[bars]))
    plot.y_range = DataRange1d(start=0)
    _set_y_axis(plot, unit)
    note = f"Each bar is the mean of up to {per_bar} steps." if per_bar > 1 else ""
    means = ", ".join(
        f"{name} {format_value(float(np.mean(values)), unit)}" for name, values in parts.items()
    )
    description = f"Stacked bars over {len(steps)} steps. Means per step: {means}."
    return Chart(title, plot, description, note, {name: colours[name] for name in parts})


def bar_rows(
    title: str, rows: Sequence[str], bars: Sequence[Bar], colours: Mapping[str, str], note: str
) -> Chart:
    """A row per name, with bars over seconds; bars inside of others are lower."""
    plot = _plot(96 + _ROW_PX * len(rows), "seconds", "xpan,xwheel_zoom,xbox_zoom,reset,save")
    heights = np.asarray([max(0.24, 0.84 - 0.2 * bar.depth) for bar in bars])
    middles = np.asarray([bar.row for bar in bars], float)
    source = ColumnDataSource(
        {
            "left": np.asarray([bar.start_s for bar in bars]),
            "right": np.asarray([bar.end_s for bar in bars]),
            "bottom": middles - heights / 2,
            "top": middles + heights / 2,
            "seconds": np.asarray([bar.end_s - bar.start_s for bar in bars]),
            "name": [bar.name for bar in bars],
            "phase": [bar.phase for bar in bars],
            "row": [rows[bar.row] for bar in bars],
            "details": [bar.details for bar in bars],
            "colour": [colours[bar.phase] for bar in bars],
        }
    )
    quads = plot.quad(
        left="left", right="right", bottom="bottom", top="top", fill_color="colour", line_color="white", line_width=0.5,
        source=source,
    )  # fmt: skip
    tooltips = [
        ("", "@name"), ("phase", "@phase"), ("row", "@row"), ("from", "@left{0.000} s"), ("took", "@seconds{0.000} s"),
        ("", "@details"),
    ]  # fmt: skip
    plot.add_tools(HoverTool(tooltips=tooltips, renderers=[quads]))
    plot.y_range = Range1d(start=len(rows) - 0.4, end=-0.6)
    plot.yaxis.ticker = FixedTicker(ticks=list(range(len(rows))))
    plot.yaxis.major_label_overrides = {index: PlainText(text=name) for index, name in enumerate(rows)}
    plot.ygrid.visible = False
    description = f"{len(bars)} bars in {len(rows)} rows, one row for each rank."
    return Chart(title, plot, description, note, dict(colours))


def _stack(
    steps: Sequence[int], parts: Mapping[str, Sequence[float]], colours: Mapping[str, str], per_bar: int
) -> ColumnDataSource:
    """Boxes of stacked bars, each of the mean of `per_bar` steps."""
    boxes: dict[str, list[float]] = {name: [] for name in ("x", "width", "bottom", "top", "value")}
    labels: dict[str, list[str]] = {name: [] for name in ("name", "steps", "colour")}
    for cut in range(0, len(steps), per_bar):
        members, bottom = steps[cut : cut + per_bar], 0.0
        label = f"{members[0]} to {members[-1]}, mean" if len(members) > 1 else str(members[0])
        for name, values in parts.items():
            value = float(np.mean(values[cut : cut + per_bar]))
            box = (
                (members[0] + members[-1]) / 2,
                members[-1] - members[0] + 0.86,
                bottom,
                bottom + value,
                value,
            )
            for column, number in zip(boxes.values(), box, strict=True):
                column.append(number)
            for column, text in zip(labels.values(), (name, label, colours[name]), strict=True):
                column.append(text)
            bottom += value
    return ColumnDataSource({name: np.asarray(column) for name, column in boxes.items()} | labels)


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `MAX_POINTS` of the points: of every stretch the lowest and the highest, or a gap where it has none."""
    if len(x) <= MAX_POINTS:
        return x, y
    kept: list[int] = []
    for stretch in np.array_split(np.arange(len(x)), MAX_POINTS // 2):
        if np.isnan(y[stretch]).all():
            kept.append(int(stretch[0]))
        else:
            kept += sorted({int(stretch[np.nanargmin(y[stretch])]), int(stretch[np.nanargmax(y[stretch])])})
    return x[kept], y[kept]


def _plot(height: int, x_name: str, tools: str = "box_zoom,pan,reset,save") -> figure:
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        tools=tools,
        active_drag=None,
        active_scroll=None,
        toolbar_location="above" if height > _SMALL_PX else None,
        x_axis_label=x_name,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=52,
        output_backend="canvas",
    )
    plot.toolbar.logo = None
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_line_color = axis.major_tick_line_color = OTHER
        axis.minor_tick_line_color = None
        axis.major_label_text_color = axis.axis_label_text_color = INK
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font = axis.major_label_text_font = "system-ui, sans-serif"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
    plot.xgrid.visible = False
    plot.ygrid.grid_line_color = "#e3e7ea"
    plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    plot.xaxis.ticker = BasicTicker(min_interval=1 if x_name == "step" else 0, desired_num_ticks=6)
    return plot


def _draw_line(
    plot: figure, name: str, places: Sequence[float], values: Sequence[float | None], colour: str
) -> DataRenderer:
    """A line through the values, with points where there are few or where a value stands alone."""
    numbers = np.asarray([np.nan if value is None else value for value in values], float)
    x, y = thinned(np.asarray(places, float), numbers)
    source = ColumnDataSource({"x": x, "y": y})
    line = plot.line("x", "y", source=source, color=colour, line_width=1.6, name=name)
    known = np.isfinite(y)
    alone = known & ~np.append(known[1:], False) & ~np.insert(known[:-1], 0, False)
    marked = known if len(x) <= NUM_MARKED else alone
    if marked.any():
        points = ColumnDataSource({"x": x[marked], "y": y[marked]})
        plot.scatter("x", "y", source=points, color=colour, size=4)
    return line


def _set_y_axis(plot: figure, unit: Unit) -> None:
    if unit == "bytes":
        plot.yaxis.ticker = AdaptiveTicker(
            base=1024, mantissas=[2.0**power for power in range(10)], desired_num_ticks=4, min_interval=1
        )
    else:
        plot.yaxis.ticker = BasicTicker(desired_num_ticks=5)
    if unit:
        plot.yaxis.formatter = NumeralTickFormatter(format=_AXIS_FORMS[unit])


def _range_around(value: float) -> Range1d:
    """The range in which a curve of one value lies, zero included."""
    if value == 0:
        return Range1d(start=-0.1, end=1.0)
    return Range1d(start=min(0.0, 2 * value), end=max(0.0, 2 * value))


def _description(lines: Mapping[str, Line], unit: Unit, x_name: str) -> str:
    parts = []
    for name, (places, values) in lines.items():
        known = [value for value in values if value is not None]
        first, last, low, high = (
            format_value(value, unit) for value in (known[0], known[-1], min(known), max(known))
        )
        place = f"{x_name} {places[0]:g} to {places[-1]:g}"
        parts.append(f"{name}, {place}: first {first}, last {last}, lowest {low}, highest {high}.")
    return " ".join(parts)


def _gap_note(lines: Mapping[str, Line]) -> str:
    missing = sum(value is None for _, values in lines.values() for value in values)
    if not missing:
        return ""
    return "One value was not finite: a gap." if missing == 1 else f"{missing} values were not finite: gaps."
