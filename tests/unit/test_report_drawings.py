"""What the report's drawings are given: points, stacks, bars and depths, against values worked out another way."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.metrics.report import charts
from hybridengine.metrics.report.blocks import ChartGroup, format_value, unit_of
from hybridengine.metrics.report.charts import curve, stacked_bars, thinned
from hybridengine.metrics.report.colours import phase_colours
from hybridengine.metrics.report.phases import OTHERS, phases_section
from hybridengine.metrics.report.run_record import RunRecord
from hybridengine.metrics.report.samples import spread
from hybridengine.metrics.report.timeline_rows import last_spans, with_depths
from hybridengine.metrics.report.transfers import Edge, edge_of
from hybridengine.metrics.timeline import Span, Timeline


def _record(**fields: Any) -> RunRecord:
    return RunRecord(
        **({"name": "x", "rows": [], "timeline": Timeline([], []), "samples": [], "config": ""} | fields)
    )


def _columns(chart: charts.Chart, renderer: int = 0) -> dict[str, list[Any]]:
    drawn: Any = chart.model.renderers[renderer]
    data = drawn.data_source.data
    return {name: np.asarray(column).tolist() for name, column in data.items()}


def test_a_curve_has_the_metrics_points_and_gaps() -> None:
    chart = curve("kl/mean", "", [1, 2, 3, 5], [0.5, None, 2.0, 1.0])
    points = _columns(chart)
    assert points["x"] == [1, 2, 3, 5]
    assert points["y"][0::2] == [0.5, 2.0]
    assert math.isnan(points["y"][1])
    assert _columns(chart, 1) == {"x": [1, 3, 5], "y": [0.5, 2.0, 1.0]}
    assert chart.note == "One value was not finite: a gap."
    assert chart.description == "kl/mean, step 1 to 5: first 0.5, last 1, lowest 0.5, highest 2."


@pytest.mark.parametrize(("value", "low", "high"), [(1e-4, 0, 2e-4), (-3.0, -6, 0), (0.0, -0.1, 1)])
def test_a_curve_of_one_value_is_drawn_inside_its_frame(value: float, low: float, high: float) -> None:
    axis: Any = curve("actor/lr", "", [1, 2, 3], [value] * 3).model.y_range
    assert (axis.start, axis.end) == (low, high)


VALUES = st.lists(st.one_of(st.just(math.nan), st.floats(-1e9, 1e9)), min_size=1, max_size=3000)


@given(values=VALUES, maximum=st.integers(2, 50))
def test_thinning_keeps_order_points_and_extremes(values: list[float], maximum: int) -> None:
    y = np.asarray(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "MAX_POINTS", maximum)
        x_kept, y_kept = thinned(np.arange(len(y)), y)
    assert len(x_kept) <= max(maximum, 2)
    assert np.all(np.diff(x_kept) > 0)
    np.testing.assert_array_equal(y[x_kept.astype(int)], y_kept)
    finite = [value for value in values if not math.isnan(value)]
    if finite:
        assert (np.nanmin(y_kept), np.nanmax(y_kept)) == (min(finite), max(finite))


def test_a_long_gap_stays_a_gap_when_points_are_left_out() -> None:
    y = np.arange(6000.0)
    y[2000:3000] = math.nan
    x_kept, y_kept = thinned(np.arange(6000), y)
    in_gap = (x_kept > 2020) & (x_kept < 2980)
    assert in_gap.any()
    assert np.isnan(y_kept[in_gap]).all()
    assert np.isfinite(y_kept[(x_kept < 1980) | (x_kept > 3020)]).all()


def test_stacked_bars_stand_on_each_other_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"a": [1.0, 2.0, 3.0, 4.0, 5.0], "b": [10.0, 0.0, 10.0, 0.0, 5.0]}
    colours = {"a": "#000001", "b": "#000002"}
    whole = _columns(stacked_bars("x", "s", [1, 2, 3, 4, 5], parts, colours))
    assert whole["top"] == [1, 11, 2, 2, 3, 13, 4, 4, 5, 10]
    assert whole["bottom"] == [0, 1, 0, 2, 0, 3, 0, 4, 0, 5]
    assert whole["x"] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert whole["colour"] == ["#000001", "#000002"] * 5
    monkeypatch.setattr(charts, "MAX_BARS", 2)
    chart = stacked_bars("x", "s", [1, 2, 3, 4, 5], parts, colours)
    means = _columns(chart)
    assert means["value"] == [2.0, pytest.approx(20 / 3), 4.5, 2.5]
    assert means["steps"] == ["1 to 3, mean"] * 2 + ["4 to 5, mean"] * 2
    assert (means["x"][0], means["x"][2]) == (2, 4.5)
    assert chart.note == "Each bar is the mean of up to 3 steps."


def test_the_smaller_phases_are_drawn_as_one() -> None:
    rows: Any = [
        {"step": step, "time/step_s": 100.0}
        | {f"time/p{phase}_s": float(phase * step) for phase in range(1, 13)}
        for step in (1, 2)
    ]
    group = phases_section(_record(rows=rows)).blocks[0]
    assert isinstance(group, ChartGroup)
    chart = group.charts[0]
    assert list(chart.legend) == [f"p{phase}" for phase in range(4, 13)] + [OTHERS]
    bars = _columns(chart)
    assert [value for name, value in zip(bars["name"], bars["value"], strict=True) if name == OTHERS] == [
        6,
        12,
    ]
    assert max(bars["top"]) == 2 * sum(range(1, 13))


@pytest.mark.parametrize(
    ("key", "edge"),
    [
        ("transfer/actor.generate->critic.values_bytes", Edge("actor.generate", "critic.values")),
        ("transfer/bytes/actor.generate->critic.values", Edge("actor.generate", "critic.values")),
        ("transfer/bytes", None),
        ("time/a->b_s", None),
    ],
)
def test_edges_are_read_from_the_metrics_names(key: str, edge: Edge | None) -> None:
    assert edge_of(key) == edge


@pytest.mark.parametrize(
    ("key", "unit", "value", "text"),
    [
        ("switch/received_bytes_back", "bytes", 1536, "1.5 KiB"),
        ("time/step_s", "s", 2.345, "2.35 s"),
        ("throughput/tokens_per_s", "", 838.94, "838.9"),
        ("rollout/tokens", "", 123456.0, "123,456"),
        ("actor/lr", "", 1e-5, "1e-05"),
        ("loss", "", 1e300, "1e+300"),
        ("loss", "", math.inf, "inf"),
        ("loss", "", None, "-"),
    ],
)
def test_values_have_the_units_of_their_names(key: str, unit: str, value: float | None, text: str) -> None:
    assert unit_of(key) == unit
    assert format_value(value, unit_of(key)) == text


def _span(start_s: float, end_s: float, **fields: Any) -> Span:
    return Span(
        **(
            {
                "name": "x",
                "phase": "p",
                "rank": 0,
                "node": "n",
                "role": "r",
                "start_s": start_s,
                "end_s": end_s,
            }
            | fields
        )
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 1))
def test_depths_are_the_numbers_of_bars_around(widths: list[int], rank: int) -> None:
    """Trees of bars: each node halves its parent `width` times."""
    spans: list[Span] = []

    def grow(low: float, high: float, level: int) -> None:
        spans.append(_span(low, high, rank=rank))
        if level < min(len(widths), 3):
            edges = np.linspace(low, high, widths[level] + 2)
            for left, right in itertools.pairwise(edges[:-1]):
                grow(float(left), float(right), level + 1)

    grow(0.0, 1.0, 0)
    spans.append(_span(0.0, 1.0, rank=1 - rank))
    for span, depth in with_depths(reversed(spans)):
        around = [
            other for other in spans
            if other is not span and other.rank == span.rank and other.start_s <= span.start_s
            and span.end_s <= other.end_s
        ]  # fmt: skip
        assert depth == len(around)


def test_bars_that_cross_lie_in_none_of_each_other() -> None:
    assert [depth for _, depth in with_depths([_span(0, 2), _span(1, 3), _span(2.5, 3), _span(4, 5)])] == [
        0,
        0,
        1,
        0,
    ]


def test_the_last_steps_are_drawn_as_far_as_they_fit() -> None:
    spans = [_span(step, step + 0.5, step=step) for step in range(1, 7) for _ in range(1000)]
    spans += [_span(5.2, 5.3, name="no step"), _span(3.2, 3.3, name="no step")]
    chosen, which = last_spans(spans)
    assert ({span.step for span in chosen}, len(chosen), which) == ({4, 5, 6, None}, 3001, "Steps 4 to 6.")
    chosen, which = last_spans([span for span in spans for _ in range(2)])
    assert ({span.step for span in chosen}, which) == ({6}, "Step 6.")
    chosen, which = last_spans([_span(number, number + 1) for number in range(5000)])
    assert (chosen[0].start_s, len(chosen), which) == (1000, 4000, "The last 4000 of 5000 spans.")
    assert last_spans([])[0] == []


def test_a_phase_has_one_colour_however_it_is_spelt() -> None:
    colours = phase_colours(["log-probs", "mine", "log_probs", "generate", "mine too"])
    assert colours["log-probs"] == colours["log_probs"]
    assert len({colours[name] for name in ("log-probs", "generate", "mine", "mine too")}) == 4


def test_the_evaluations_shown_are_spread_over_the_run() -> None:
    assert spread([0, 10]) == [0, 10]
    assert spread(list(range(0, 110, 10))) == [0, 20, 50, 80, 100]
