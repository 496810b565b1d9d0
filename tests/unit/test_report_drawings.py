"""Metrics, curves, bars and rows of the report's figures, compared with sums worked out in another way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.formatting import format_seconds
from hybridengine.report import figures
from hybridengine.report.figures import (
    FIGURES,
    OTHERS,
    draw_figure,
    draw_timeline,
    largest,
    phase_colours,
)
from hybridengine.report.page import spread
from hybridengine.report.step_rows import Row
from hybridengine.report.timeline import Span

SHOWN = {
    "Held-out result": ("eval/exact_match", "eval/score_mean"),
    "Held-out loss and accuracy": ("eval/loss", "eval/accuracy"),
    "Rewards of preferred and other responses": ("actor/dpo_chosen_reward", "actor/dpo_margin"),
    "Reward and cost": ("reward/mean", "reward/style_mean", "cost/mean"),
    "KL divergence from the reference": ("kl/mean",),
    "Largest log-prob difference between engine and trainer": ("rollout/log_prob_abs_diff_max",),
    "Entropy": ("rollout/entropy_mean",),
    "Response length in tokens": ("rollout/response_tokens_mean",),
    "Age of the tokens in versions of the weights": ("staleness/age_mean", "staleness/age_max"),
    "Share of tokens by age": ("staleness/age_0_share", "staleness/age_12_share", "staleness/older_share"),
    "Responses in the queue": ("queue/complete", "queue/unfinished"),
    "Share of the step without a call, by pool": ("idle/main_share", "idle/engines.0_share"),
    "Load of a mixture's experts": ("actor/expert_load_max", "critic/expert_idle_share"),
    "Loss": ("actor/policy_loss", "critic/value_loss", "actor/kl_loss", "actor/dpo_loss", "warmup/loss"),
    "Gradient norm": ("actor/grad_norm", "critic/grad_norm"),
    "Share of clipped ratios": ("actor/clip_fraction", "actor/dual_clip_fraction", "critic/clip_fraction"),
    "Rows and steps left out, failures": (
        "rollout/dropped_rows", "reward/dropped_rows", "actor/skipped_steps", "reward/failures", "cost/timeouts",
    ),
    "Tokens per second": ("throughput/tokens_per_s",),
    "Memory of the rank with the most": ("memory/resident_bytes", "memory/device_bytes"),
    "Weights held while switching": ("switch/peak_weight_bytes", "switch/redundant_bytes"),
    "Seconds of each phase": ("time/generate_s", "time/update_actor_s"),
    "Bytes fetched, by producer and consumer": ("transfer/actor.generate_sequences->critic.update_bytes",),
}  # fmt: skip
"""Figure -> metrics of the runs that have it."""
NOT_SHOWN = (
    "step", "time/step_s", "actor/lr", "transfer/bytes", "switch/received_bytes", "controller/overhead_s",
    "reward/calls", "actor/router_aux", "rollout/response_tokens_p50", "rollout/tokens", "queue/wait_s",
    "staleness/older_share_quarter_1",
)  # fmt: skip


@pytest.fixture
def canvases(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Canvases that matplotlib has drawn."""
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "_image", lambda canvas: drawn.append(canvas) or "data:")
    return drawn


def _figure(title: str) -> figures.Figure:
    return next(figure for figure in FIGURES if figure.title == title)


def test_every_metric_is_in_the_figure_that_it_belongs_to() -> None:
    assert [figure.title for figure in FIGURES] == list(SHOWN)
    wanted = {key: title for title, names in SHOWN.items() for key in names} | dict.fromkeys(NOT_SHOWN)
    for key, title in wanted.items():
        found = [figure.title for figure in FIGURES if figure.has(key)]
        assert found == ([title] if title else []), key


def test_a_curve_has_the_metrics_points_and_gaps(canvases: list[Any]) -> None:
    rows: list[Row] = [
        {"step": 0}, {"step": 1, "kl/mean": 0.5}, {"step": 2, "kl/mean": None}, {"step": 3, "kl/mean": 2.0}, {"step": 4},
        {"step": 5, "kl/mean": 1.0},
    ]  # fmt: skip
    drawing = draw_figure(_figure("KL divergence from the reference"), rows)
    assert drawing is not None
    (line,) = canvases[0].axes[0].lines
    assert line.get_xdata().tolist() == [1, 2, 3, 5]
    np.testing.assert_array_equal(line.get_ydata(), [0.5, math.nan, 2.0, 1.0])
    assert drawing.description == "kl/mean: first 0.5, last 1, lowest 0.5, highest 2"
    assert drawing.note == "Values that were not finite: 1."
    assert draw_figure(_figure("KL divergence from the reference"), [{"step": 1, "kl/mean": None}]) is None


def test_the_largest_of_many_curves_are_drawn(canvases: list[Any]) -> None:
    rows: list[Row] = [{"step": 1, **{f"role{number}/grad_norm": float(number) for number in range(20)}}]
    drawing = draw_figure(_figure("Gradient norm"), rows)
    assert [line.get_ydata()[0] for line in canvases[0].axes[0].lines] == list(range(12, 20))
    assert drawing is not None
    assert drawing.note == "The 8 largest of 20."


def test_bars_stand_on_each_other_and_add_up(canvases: list[Any]) -> None:
    """Ten phases of 700 steps; the two smallest are joined."""
    rows: list[Row] = [
        {"step": step, "time/step_s": 1e3}
        | {f"time/p{phase}_s": float(phase * step) for phase in range(1, 11)}
        for step in range(701)
    ]
    drawing = draw_figure(_figure("Seconds of each phase"), rows)
    parts = {patch.get_label(): patch.get_data() for patch in canvases[0].axes[0].patches}
    assert list(parts) == [f"p{phase}" for phase in range(3, 11)] + [OTHERS]
    top, steps = np.zeros(700), np.arange(1, 701)
    for values, edges, baseline in parts.values():
        np.testing.assert_allclose(baseline, top)
        np.testing.assert_allclose(edges, np.arange(1, 702) - 0.5)
        top = values
    np.testing.assert_allclose(top, 55 * steps)
    np.testing.assert_allclose(parts[OTHERS].values - parts[OTHERS].baseline, 3 * steps)
    assert drawing is not None
    assert drawing.description.startswith(f"Means per step: p3 {format_seconds(3 * 350.5)}, ")


@given(values=st.lists(st.floats(0, 1e9), min_size=1, max_size=50), num_parts=st.integers(1, 20))
def test_others_lose_nothing(values: list[float], num_parts: int) -> None:
    parts = {f"part {number}": np.array(values) * (number % 7) for number in range(num_parts)}
    shown = largest(parts)
    assert len(shown) <= figures.MAX_PARTS + 1
    np.testing.assert_allclose(np.sum(list(shown.values()), axis=0), np.sum(list(parts.values()), axis=0))


@pytest.mark.parametrize("title", ["Loss", "Weights held while switching", "Seconds of each phase"])
def test_values_of_any_size_are_drawn(title: str) -> None:
    key = SHOWN[title][0]
    for value in (0, 1e-300, 1e300, -1e300, 7) if title != "Loss" else (0, -1e300):
        drawing = draw_figure(_figure(title), [{"step": 1, key: value}, {"step": 2, key: value}])
        if value or title != "Seconds of each phase":
            assert drawing is not None
            assert drawing.image.startswith("data:image/svg+xml;base64,")


def _span(start_s: float, end_s: float, rank: int, **fields: Any) -> Span:
    given = {"name": "x", "phase": "p", "node": "n", "role": "r", "step": 2} | fields
    return Span(rank=rank, start_s=start_s, end_s=end_s, **given)


def test_the_timeline_has_a_row_per_rank_and_the_last_step(canvases: list[Any]) -> None:
    spans = [
        _span(0, 1, 0, step=1),
        _span(10, 12, 1),
        _span(10.5, 13, 0),
        _span(10, 10.5, 1, phase="transfers"),
    ]
    spans.append(_span(13, 12, 2))  # a clock was set back
    drawing = draw_timeline(spans)
    assert drawing is not None
    axes = canvases[0].axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    boxes = set()
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            boxes.add((collection.get_label(), (box.y0 + box.y1) / 2, box.x0, box.width))
    assert boxes == {("p", 0, 0.5, 2.5), ("p", 1, 0, 2), ("transfers", 1, 0, 0.5), ("p", 2, 3, 0)}
    assert draw_timeline([]) is None
    assert draw_timeline(spans, range(5, 9)) is None
    chosen = draw_timeline(spans, range(1, 2))
    assert chosen is not None and chosen.description == "1 bars in 1 rows, one row per rank."
    both = draw_timeline(spans, range(1, 3))
    assert both is not None and canvases[-1].axes[0].get_xlabel() == "seconds of steps 1 to 2"


def test_the_first_of_many_ranks_are_shown_with_their_nodes(canvases: list[Any]) -> None:
    spans = [_span(0, 1, rank, node=f"node-{rank // 8}", pool="main") for rank in range(80)]
    drawing = draw_timeline(spans)
    assert drawing is not None
    assert drawing.note == "The first 64 of 80 ranks."
    names = [text.get_text() for text in canvases[0].axes[0].get_yticklabels()]
    assert (len(names), names[0], names[-1]) == (64, "node-0 main rank 0", "node-7 main rank 63")


def test_engines_have_rows_in_the_order_of_their_numbers(canvases: list[Any]) -> None:
    names = [*(f"engines.{number}" for number in range(12)), "main"]
    draw_timeline([_span(0, 1, 0, pool=pool) for pool in reversed(names)])
    shown = [text.get_text() for text in canvases[0].axes[0].get_yticklabels()]
    assert shown == [f"{pool} rank 0" for pool in names]


def test_pushes_and_switches_have_colours_of_their_own() -> None:
    phases = ("generate", "switch", "weights", "updates", "log-probs", "scores", "prompts")
    assert len(set(phase_colours(phases).values())) == len(phases)


def test_a_phase_has_one_colour_however_it_is_spelt() -> None:
    colours = phase_colours(["log-probs", "mine", "log_probs", "generate", "mine too"])
    assert colours["log-probs"] == colours["log_probs"]
    assert len({colours[name] for name in ("log-probs", "generate", "mine", "mine too")}) == 4


def test_the_evaluations_shown_are_spread_over_the_run() -> None:
    assert spread([0, 10]) == [0, 10]
    assert spread(list(range(0, 110, 10))) == [0, 20, 50, 80, 100]
