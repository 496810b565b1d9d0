"""Figures of a run's report: the table of figures, and functions that draw each kind.

Colours are distinguishable with any colour vision, and a phase has the same one in every figure.
Source: Okabe and Ito, "Color Universal Design", 2008; lighter shades for the second of a pair.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from hybridengine.charts import STYLE
from hybridengine.formatting import format_bytes, format_seconds
from hybridengine.report import keys
from hybridengine.report.samples import printable
from hybridengine.report.step_rows import Row
from hybridengine.report.timeline import Place, Span, row_order

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#7a6a00", "#332288")
RESERVE = ("#882255", "#44aa99", "#8a5a3c", "#aa4499", "#117733", "#ddcc77", "#6699cc", "#994455")
"""Colours of phases that `PHASES` lacks."""
OTHERS = "others"
"""Name of the parts that are merged into one because there are too many."""
PHASES = {
    "generate": "#0072b2",
    "switch": "#e69f00",
    "switch_to_generate": "#e69f00",
    "switch_to_train": "#f3cf80",
    "log_probs": "#009e73",
    "ref_log_probs": "#80cfb9",
    "values": "#56b4e9",
    "cost_values": "#aad8f2",
    "scores": "#cc79a7",
    "costs": "#e3bcd1",
    "updates": "#d55e00",
    "update_actor": "#d55e00",
    "update_critic": "#eaaf80",
    "update_cost_critic": "#b07040",
    "weights": "#661100",
    "update_weights": "#661100",
    "receive_weights": "#b3766b",
    "advantages": "#332288",
    "prompts": "#7a6a00",
    "statistics": "#999933",
    "other": "#5c7c8a",
    "transfers": "#26323a",
    OTHERS: "#b8bfc4",
}
MAX_PARTS = len(PALETTE)
"""Largest number of curves, or parts of a bar, in a figure."""
MAX_POINTS = 60
"""Largest number of points of a curve that are drawn with markers."""
MAX_NAME = 60
"""Largest number of characters of a name in a drawing."""
MAX_SPANS = 4000
MAX_RANKS = 64
FORMATS = {"bytes": format_bytes, "s": format_seconds, "": "{:.4g}".format}


@dataclass(frozen=True)
class Figure:
    """Metrics that are drawn together, selected by patterns of their names."""

    title: str
    patterns: tuple[str, ...]
    unit: Literal["", "bytes", "s"] = ""
    is_stack: bool = False
    """True if the metrics are stacked in one bar per step; otherwise each is a curve."""
    is_of_some: bool = False
    """True if only runs of some kind have the metrics: others are not said to lack them."""

    def has(self, key: str) -> bool:
        return key != keys.STEP_S and any(fnmatchcase(key, pattern) for pattern in self.patterns)


FIGURES = (
    Figure("Held-out result", (keys.EXACT_MATCH, keys.SCORE_MEAN)),
    Figure(
        "Held-out loss and accuracy",
        (keys.HELD_OUT_LOSS, "eval/accuracy"),
        is_of_some=True,
    ),
    Figure(
        "Rewards of preferred and other responses",
        ("actor/dpo_*_reward", "actor/dpo_margin"),
        is_of_some=True,
    ),
    Figure("Reward and cost", (keys.REWARD_MEAN, "reward/*_mean", "cost/mean", "cost/*_mean")),
    Figure("KL divergence from the reference", (keys.KL_MEAN,)),
    Figure("Largest log-prob difference between engine and trainer", (keys.LOG_PROB_ABS_DIFF_MAX,)),
    Figure("Entropy", ("rollout/entropy_mean",)),
    Figure("Response length in tokens", (keys.RESPONSE_TOKENS_MEAN,)),
    Figure(
        "Age of the tokens in versions of the weights",
        (keys.AGE_MEAN, keys.AGE_MAX),
        is_of_some=True,
    ),
    Figure(
        "Share of tokens by age",
        ("staleness/age_*_share", keys.OLDER_SHARE),
        is_stack=True,
        is_of_some=True,
    ),
    Figure("Responses in the queue", (keys.QUEUE_COMPLETE, keys.QUEUE_UNFINISHED), is_of_some=True),
    Figure("Share of the step without a call, by pool", (keys.idle_key("*"),), is_of_some=True),
    Figure("Load of a mixture's experts", ("*/expert_load_max", "*/expert_idle_share"), is_of_some=True),
    Figure("Loss", ("warmup/loss", "*_loss")),
    Figure("Gradient norm", ("*/grad_norm",)),
    Figure("Share of clipped ratios", ("*/*clip_fraction",)),
    Figure(
        "Rows and steps left out, failures", ("*/dropped_rows", "*/skipped_steps", "*/failures", "*/timeouts")
    ),
    Figure("Tokens per second", (keys.TOKENS_PER_S,)),
    Figure("Memory of the rank with the most", (keys.memory_key("*"),), "bytes"),
    Figure("Weights held while switching", (keys.PEAK_WEIGHT_BYTES, keys.REDUNDANT_BYTES), "bytes"),
    Figure("Seconds of each phase", (keys.time_key("*"),), "s", is_stack=True),
    Figure("Bytes fetched, by producer and consumer", ("transfer/*->*_bytes",), "bytes", is_stack=True),
)
"""Figures in the order of the page."""


@dataclass(frozen=True)
class Drawing:
    """Image of a figure as a data URL, its contents in words, and a note on what it lacks."""

    image: str
    description: str
    note: str = ""
    is_wide: bool = False
    """True if the image spans the width of the page."""


def draw_figure(figure: Figure, rows: Sequence[Row]) -> Drawing | None:
    """Return the drawing of a figure, or None if the run has no values for it."""
    names = [key for key in dict.fromkeys(key for row in rows for key in row) if figure.has(key)]
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(11.4, 3.2) if figure.is_stack else (5.6, 3.0), layout="constrained")
        axes = canvas.subplots()
        if figure.is_stack:
            description, note = _draw_stack(figure, axes, names, [row for row in rows if row[keys.STEP]]), ""
        else:
            description, note = _draw_lines(figure, axes, names, rows)
        if not description:
            return None
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: FORMATS[figure.unit](value)))
        if figure.unit == "bytes":
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(MultipleLocator(2.0 ** math.floor(math.log2((high - low) / 3))))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlabel("step")
        if len(axes.get_legend_handles_labels()[0]) > 1:
            canvas.legend(loc="outside lower center", ncols=4 if figure.unit == "s" else 2, frameon=False)
        return Drawing(_image(canvas), description, note, figure.is_stack)


def _draw_lines(figure: Figure, axes: Axes, names: Iterable[str], rows: Sequence[Row]) -> tuple[str, str]:
    """Draw one curve per metric, with gaps for values that were not finite. Return a description and a note."""
    curves, num_gaps = dict[str, tuple[list[float], np.ndarray]](), 0
    for name in names:
        present = [row for row in rows if name in row]
        values = np.array([row[name] for row in present], dtype=float)
        num_gaps += int(np.isnan(values).sum())
        if not np.isnan(values).all():
            curves[name] = [float(row[keys.STEP] or 0) for row in present], values
    shown = sorted(curves, key=lambda name: -np.nanmax(np.abs(curves[name][1])))[:MAX_PARTS]
    form, facts = FORMATS[figure.unit], list[str]()
    for name, colour in zip([name for name in curves if name in shown], PALETTE, strict=False):
        steps, values = curves[name]
        marker = "." if len(steps) <= MAX_POINTS else None
        axes.plot(steps, values, color=colour, marker=marker, linewidth=1.2, label=_label(name))
        known = values[~np.isnan(values)]
        ends = f"first {form(known[0])}, last {form(known[-1])}"
        facts.append(f"{name}: {ends}, lowest {form(known.min())}, highest {form(known.max())}")
    notes = [f"Values that were not finite: {num_gaps}." if num_gaps else ""]
    notes += [f"The {len(shown)} largest of {len(curves)}." if len(shown) < len(curves) else ""]
    return "; ".join(facts), " ".join(filter(None, notes))


def _draw_stack(figure: Figure, axes: Axes, names: Iterable[str], rows: Sequence[Row]) -> str:
    """Draw one bar per step, of which each part is an outline over all steps. Return a description."""
    parts = {name: np.array([row.get(name) or 0.0 for row in rows], dtype=float) for name in names}
    parts = largest({_part_name(name): values for name, values in parts.items() if values.any()})
    steps = [float(row[keys.STEP] or 0) for row in rows]
    edges = np.array([*steps, *(step + 1 for step in steps[-1:])])
    bottom = np.zeros(len(rows))
    for name, colour in phase_colours(parts).items():
        top = bottom + parts[name]
        axes.stairs(top, edges - 0.5, baseline=bottom, fill=True, color=colour, label=_label(name))
        bottom = top
    facts = (f"{name} {FORMATS[figure.unit](values.mean())}" for name, values in parts.items())
    return "Means per step: " + ", ".join(facts) if parts else ""


def largest(parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the `MAX_PARTS` parts with the largest sums, in the given order, and the sum of the others."""
    ranked = sorted(parts, key=lambda name: -parts[name].sum())
    shown = {name: values for name, values in parts.items() if name in ranked[:MAX_PARTS]}
    if rest := ranked[MAX_PARTS:]:
        shown[OTHERS] = np.sum([parts[name] for name in rest], axis=0)
    return shown


def phase_colours(phases: Iterable[str]) -> dict[str, str]:
    """Return the colour of each phase, in the given order; "log-probs" and "log_probs" share one."""
    reserve = itertools.cycle(RESERVE)
    return {
        phase: PHASES.get(phase.replace("-", "_").lower()) or next(reserve) for phase in dict.fromkeys(phases)
    }


def draw_timeline(
    spans: Sequence[Span], steps: range | None = None, plot: Path | None = None
) -> Drawing | None:
    """Return a drawing of every rank's work in some steps, by default the last; None if no span belongs to them.

    `plot` is a file to which the drawing is written as well.
    """
    if steps is None:
        last = max((span.step for span in spans if span.step is not None), default=-1)
        steps = range(last, last + 1)
    by_place: dict[Place, list[Span]] = {}
    for span in spans:
        if span.step is not None and span.step in steps:
            by_place.setdefault((span.node, span.pool, span.rank), []).append(span)
    if not by_place:
        return None
    places = sorted(by_place, key=row_order)[:MAX_RANKS]
    has_nodes = len({node for node, _, _ in by_place}) > 1
    shown = [(row, span) for row, place in enumerate(places) for span in by_place[place]]
    shown = sorted(shown, key=lambda one: one[1].start_s)[-MAX_SPANS:]
    first_s = shown[0][1].start_s
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(11.4, 1.3 + 0.28 * len(places)), layout="constrained")
        axes = canvas.subplots()
        for phase, colour in phase_colours(span.phase for _, span in shown).items():
            is_part = phase == "transfers"  # rows are fetched within a call
            bars = [
                _bar(span.start_s - first_s, span.end_s - first_s, row, 0.36 if is_part else 0.8)
                for row, span in shown
                if span.phase == phase
            ]
            axes.add_collection(
                PolyCollection(bars, color=colour, linewidth=0, zorder=2 + is_part, label=_label(phase))
            )
        axes.autoscale_view()
        names = [
            _label(f"{node if has_nodes else ''} {pool} rank {rank}".replace("  ", " ").strip())
            for node, pool, rank in places
        ]
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        named = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        axes.set_xlabel(f"seconds of {named}")
        canvas.legend(loc="outside lower center", ncols=8, frameon=False)
        if plot is not None:
            canvas.savefig(plot, dpi=130, metadata={"Date": None} if plot.suffix.lower() == ".svg" else None)
        note = "" if len(places) == len(by_place) else f"The first {len(places)} of {len(by_place)} ranks."
        return Drawing(_image(canvas), f"{len(shown)} bars in {len(places)} rows, one row per rank.", note)


def _bar(start: float, end: float, row: int, height: float) -> list[tuple[float, float]]:
    """Return the corners of a bar; one that ends before it starts, by a clock set back, has no width."""
    end, low, high = max(start, end), row - height / 2, row + height / 2
    return [(start, low), (end, low), (end, high), (start, high)]


def _part_name(key: str) -> str:
    """Return the distinguishing part of a stacked metric's name: "time/generate_s" -> "generate"."""
    return key.split("/", 1)[1].rsplit("_", 1)[0]


def _label(name: str) -> str:
    """Return a name in printable characters, cut to `MAX_NAME`."""
    shown = printable(name)
    return shown if len(shown) <= MAX_NAME else shown[: MAX_NAME - 3] + "..."


def _image(canvas: Canvas) -> str:
    """Return a drawing as a data URL."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that the font lacks
        canvas.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
