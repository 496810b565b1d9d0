"""A picture of a benchmark: seconds and bytes of every method, one column of panels per pair of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridengine.bench.results import PairResult, Timing
from hybridengine.bench.spec import BenchSpec
from hybridengine.metrics.formatting import format_bytes, format_seconds

THERE, BACK = ("there", "#0072B2"), ("back", "#E69F00")
RECEIVED, PEAK, REDUNDANT = ("received", "#56B4E9"), ("peak weights", "#BBBBBB"), ("redundant", "#D55E00")
INK = "#333333"


def draw(spec: BenchSpec, pairs: Sequence[PairResult], file: Path) -> None:
    """Write the picture into `file`, in the form that its name says."""
    import matplotlib  # an extra: needed for pictures only

    matplotlib.use("agg")
    from matplotlib import pyplot

    height = 2.0 + 0.9 * max(len(pair.results) for pair in pairs)
    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "hybridengine",
    }
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(
            2,
            len(pairs),
            figsize=(max(4.4 * len(pairs), 6.5), height),
            squeeze=False,
            sharey=True,
            layout="constrained",
        )
        for column, pair in enumerate(pairs):
            _draw_seconds(axes[0][column], pair)
            _draw_bytes(axes[1][column], pair, spec.weight_bytes)
        bars = (THERE, BACK, RECEIVED, PEAK, REDUNDANT)
        figure.legend(
            [pyplot.Rectangle((0, 0), 1, 1, color=color) for _, color in bars],
            [name for name, _ in bars],
            loc="outside lower center",
            ncols=len(bars),
            frameon=False,
        )
        figure.suptitle(
            f"Switching {format_bytes(spec.weight_bytes)} of weights between training and generation",
            color=INK,
        )
        figure.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        pyplot.close(figure)


def _draw_seconds(axis: Any, pair: PairResult) -> None:
    """Medians as bars, lowest to highest as lines."""
    largest = max(result.there.highest for result in pair.results)
    for row, result in enumerate(pair.results):
        for offset, timing, (_, color) in ((-0.2, result.there, THERE), (0.2, result.back, BACK)):
            axis.barh(row + offset, timing.median, 0.36, color=color)
            axis.plot([timing.lowest, timing.highest], [row + offset] * 2, color=INK, linewidth=1)
            _write(axis, _end(timing), row + offset, format_seconds(timing.median))
    axis.set_title(f"{pair.pair} on {pair.pair.train.num_ranks} ranks", color=INK)
    _finish(axis, pair, largest, "seconds: median, lowest to highest")


def _draw_bytes(axis: Any, pair: PairResult, weight_bytes: int) -> None:
    largest = max(result.peak_weight_bytes_max for result in pair.results) / weight_bytes
    for row, result in enumerate(pair.results):
        for offset, num_bytes, (_, color) in (
            (-0.26, result.received_bytes_max, RECEIVED),
            (0.0, result.peak_weight_bytes_max, PEAK),
            (0.26, result.redundant_bytes_max, REDUNDANT),
        ):
            axis.barh(row + offset, num_bytes / weight_bytes, 0.24, color=color)
            _write(axis, num_bytes / weight_bytes, row + offset, format_bytes(num_bytes))
    _finish(axis, pair, largest, "of all weights, rank with the most")


def _end(timing: Timing) -> float:
    return max(timing.median, timing.highest)


def _write(axis: Any, end: float, height: float, text: str) -> None:
    axis.annotate(text, (end, height), (4, 0), textcoords="offset points", va="center", fontsize=7, color=INK)


def _finish(axis: Any, pair: PairResult, largest: float, label: str) -> None:
    axis.set_xlim(0, largest * 1.25)
    axis.set_xlabel(label, fontsize=8)
    axis.set_yticks(range(len(pair.results)), [result.method.value for result in pair.results])
    axis.set_ylim(len(pair.results) - 0.5, -0.5)
