"""Chart of a benchmark: seconds and bytes of every method, one column of panels per pair of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from hybridengine.bench.reshard.results import PairResult
from hybridengine.bench.reshard.spec import BenchSpec
from hybridengine.charts import Bars, drawing, grouped_bars
from hybridengine.formatting import format_bytes, format_seconds

SECONDS = {"there": ("seconds_there", "#0072B2"), "back": ("seconds_back", "#E69F00")}
BYTES = {
    "received": ("received_bytes_max", "#56B4E9"),
    "peak weights": ("peak_weight_bytes_max", "#BBBBBB"),
    "redundant": ("redundant_bytes_max", "#D55E00"),
}
"""Name and colour of each figure, by label."""


def draw(spec: BenchSpec, pairs: Sequence[PairResult], file: Path) -> None:
    """Write the chart to `file`, in the format of its suffix."""
    title = f"Switching {format_bytes(spec.weight_bytes)} of weights between training and generation"
    height = 2.0 + 0.9 * max(len(pair.results) for pair in pairs)
    with drawing(file, title, max(4.4 * len(pairs), 6.5), height) as figure:
        axes = figure.subplots(2, len(pairs), squeeze=False, sharey=True)
        for (seconds, num_bytes), pair in zip(axes.T, pairs, strict=True):
            _draw_seconds(seconds, pair)
            _draw_bytes(num_bytes, pair, spec.weight_bytes)
        handles = [handle for row in axes for handle in row[0].get_legend_handles_labels()[0]]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _draw_seconds(axes: Axes, pair: PairResult) -> None:
    """Draw medians as bars, and the range from fastest to slowest as lines."""
    series: dict[str, Bars] = {}
    for label, (name, colour) in SECONDS.items():
        medians, fastest, slowest = (
            [result[key] for result in pair.results] for key in (name, f"{name}_min", f"{name}_max")
        )
        below = [median - one for median, one in zip(medians, fastest, strict=True)]
        above = [one - median for median, one in zip(medians, slowest, strict=True)]
        series[label] = colour, medians, [below, above]
    drawn = grouped_bars(axes, [result["method"] for result in pair.results], series)
    for bars, (_, medians, _) in zip(drawn, series.values(), strict=True):
        axes.bar_label(bars, list(map(format_seconds, medians)), padding=4, fontsize=7)
    axes.set_xlim(0, 1.25 * max(result["seconds_there_max"] for result in pair.results))
    figures = pair.figures
    axes.set_title(f"{figures['train']} -> {figures['gen']} on {figures['num_ranks']} ranks", loc="center")
    axes.set_xlabel("seconds: median, fastest to slowest", fontsize=8)


def _draw_bytes(axes: Axes, pair: PairResult, weight_bytes: int) -> None:
    series: dict[str, Bars] = {
        label: (colour, [result[name] / weight_bytes for result in pair.results], None)
        for label, (name, colour) in BYTES.items()
    }
    drawn = grouped_bars(axes, [result["method"] for result in pair.results], series)
    for bars, (name, _) in zip(drawn, BYTES.values(), strict=True):
        axes.bar_label(bars, [format_bytes(result[name]) for result in pair.results], padding=4, fontsize=7)
    axes.set_xlabel("of all weights, rank with the most", fontsize=8)
