"""A picture of a benchmark: seconds and bytes of every method, one column of panels per pair of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from hybridengine.bench.results import PairResult
from hybridengine.bench.spec import BenchSpec
from hybridengine.charts import drawing, grouped_bars
from hybridengine.metrics.formatting import format_bytes, format_seconds


def draw(spec: BenchSpec, pairs: Sequence[PairResult], file: Path) -> None:
    """Write the picture into `file`, in the form that its name says."""
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
    """Medians as bars, lowest to highest as lines."""
    timings = {
        "there": ("#0072B2", [result.there for result in pair.results]),
        "back": ("#E69F00", [result.back for result in pair.results]),
    }
    series = {
        name: (
            colour,
            [one.median for one in found],
            [[one.median - one.lowest for one in found], [one.highest - one.median for one in found]],
        )
        for name, (colour, found) in timings.items()
    }
    drawn = grouped_bars(axes, [result.method.value for result in pair.results], series)
    for bars, (_, found) in zip(drawn, timings.values(), strict=True):
        axes.bar_label(bars, [format_seconds(one.median) for one in found], padding=4, fontsize=7)
    axes.set_xlim(0, 1.25 * max(result.there.highest for result in pair.results))
    axes.set_title(f"{pair.pair} on {pair.pair.train.num_ranks} ranks", loc="center")
    axes.set_xlabel("seconds: median, lowest to highest", fontsize=8)


def _draw_bytes(axes: Axes, pair: PairResult, weight_bytes: int) -> None:
    figures = {
        "received": ("#56B4E9", [result.received_bytes_max for result in pair.results]),
        "peak weights": ("#BBBBBB", [result.peak_weight_bytes_max for result in pair.results]),
        "redundant": ("#D55E00", [result.redundant_bytes_max for result in pair.results]),
    }
    series = {
        name: (colour, [one / weight_bytes for one in found], None)
        for name, (colour, found) in figures.items()
    }
    drawn = grouped_bars(axes, [result.method.value for result in pair.results], series)
    for bars, (_, found) in zip(drawn, figures.values(), strict=True):
        axes.bar_label(bars, list(map(format_bytes, found)), padding=4, fontsize=7)
    axes.set_xlabel("of all weights, rank with the most", fontsize=8)
