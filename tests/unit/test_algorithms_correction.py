"""Rollout corrections: weights, dropped rows and metrics, compared with loops over Python floats."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.algorithms.correction import correction_metrics, rollout_weights
from hybridengine.algorithms.losses.policy import policy_loss
from hybridengine.algorithms.masking import response_mask
from hybridengine.config.algorithm import CorrectionName
from tests.unit.test_algorithms_across import cut, on_ranks

Rows = list[list[tuple[float, float]]]
"""Log-probs of each valid token under the training policy and under the rollout policy."""

WIDTH = 4
ROWS: Rows = [
    [(-1.0, -1.5), (-0.5, -2.0), (-3.0, -1.0)],
    [],
    [(-1.0, -3.0)],
    [(-1.0, -1.5), (-0.25, -1.0)],
    [(-2.0, -1.9), (-2.0, -2.1), (-1.0, -1.0), (-0.5, -0.6)],
    [(-4.0, -0.5)],
]
LOW, HIGH = 0.5, 2.0
CORRECTIONS = get_args(CorrectionName)


def _columns(
    rows: Rows, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask_BR = response_mask(torch.tensor([len(row) for row in rows], dtype=torch.int64), WIDTH)
    padded = [row + [(math.nan, math.nan)] * (WIDTH - len(row)) for row in rows]
    both = torch.tensor(padded, dtype=dtype).reshape(len(rows), WIDTH, 2)
    return both[..., 0], both[..., 1], mask_BR


def _expected_row(
    name: CorrectionName, row: list[tuple[float, float]]
) -> tuple[list[float], bool, list[float], list[float]]:
    """Return token weights, True if the row is kept, and ratio and weight of each unit; products, no logarithms."""
    ratios = [math.exp(new) / math.exp(old) for new, old in row]
    if not row:
        return [], True, [], []
    if name == "token_tis":
        weights = [min(ratio, HIGH) for ratio in ratios]
        return weights, True, ratios, weights
    if name == "icepop":
        weights = [ratio if LOW <= ratio <= HIGH else 0.0 for ratio in ratios]
        return weights, True, ratios, weights
    product = math.prod(ratios)
    weight, keep = min(product, HIGH), True
    if name == "sequence_mis":
        keep = product <= HIGH
        weight = product if keep else 0.0
    elif name == "geometric_filter":
        product **= 1 / len(row)
        keep = LOW <= product <= HIGH
        weight = float(keep)
    return [weight] * len(row), keep, [product], [weight]


def _expected_metrics(name: CorrectionName, rows: Rows) -> dict[str, float]:
    ratios, weights, capped, dropped = [], [], 0, 0
    for row in rows:
        _, keep, row_ratios, row_weights = _expected_row(name, row)
        ratios += row_ratios
        weights += row_weights
        dropped += row_weights.count(0.0) if name == "icepop" else len(row_ratios) * (not keep)
        capped += sum(ratio > HIGH for ratio in row_ratios) if name.endswith("tis") else 0
    count = max(len(ratios), 1)
    squares = math.fsum(weight**2 for weight in weights)
    return {
        "correction/ratio_mean": math.fsum(ratios) / count,
        "correction/ratio_max": max(ratios, default=0.0),
        "correction/weight_mean": math.fsum(weights) / count,
        "correction/capped_fraction": capped / count,
        "correction/dropped_fraction": dropped / count,
        "correction/effective_sample_share": math.fsum(weights) ** 2 / (count * squares) if squares else 0.0,
    }


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_and_metrics_against_loops(name: CorrectionName, dtype: torch.dtype) -> None:
    new_BR, old_BR, mask_BR = _columns(ROWS, dtype)
    weights = rollout_weights(name, new_BR.requires_grad_(), old_BR, mask_BR, HIGH, LOW)
    assert weights.weights_BR.dtype == dtype
    assert not weights.weights_BR.requires_grad
    for number, row in enumerate(ROWS):
        expected, keep, *_ = _expected_row(name, row)
        assert weights.weights_BR[number].tolist() == pytest.approx(
            expected + [0.0] * (WIDTH - len(row)), rel=1e-6
        )
        assert bool(weights.keep_B[number]) == keep
    metrics = _expected_metrics(name, ROWS)
    assert correction_metrics(weights) == pytest.approx(metrics, rel=1e-6)
    assert (metrics["correction/capped_fraction"] > 0) == name.endswith("tis")
    assert (metrics["correction/dropped_fraction"] > 0) != name.endswith("tis")


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_same_policy_weighs_everything_with_1(name: CorrectionName) -> None:
    new_BR, _, mask_BR = _columns(ROWS)
    weights = rollout_weights(name, new_BR, new_BR, mask_BR, HIGH, LOW)
    assert weights.weights_BR.tolist() == mask_BR.double().tolist()
    assert weights.keep_B.all()
    assert correction_metrics(weights)["correction/effective_sample_share"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_no_valid_token_and_no_rows(name: CorrectionName) -> None:
    """An empty response has a product of 1, which a cap below 1 does not drop."""
    for rows in ([[], []], []):
        weights = rollout_weights(name, *_columns(rows), high=0.5, low=0.25)
        assert weights.weights_BR.tolist() == [[0.0] * WIDTH for _ in rows]
        assert weights.keep_B.tolist() == [True for _ in rows]
        assert set(correction_metrics(weights).values()) == {0.0}


@pytest.mark.parametrize("name", ["icepop", "sequence_mis", "geometric_filter"])
def test_everything_dropped(name: CorrectionName) -> None:
    rows: Rows = [[(-1.0, -9.0)], [(-0.5, -7.0), (-0.5, -8.0)]]
    weights = rollout_weights(name, *_columns(rows), high=HIGH, low=LOW)
    assert weights.keep_B.tolist() == [name == "icepop"] * 2
    assert not weights.weights_BR.any()
    metrics = correction_metrics(weights)
    assert metrics["correction/dropped_fraction"] == 1.0
    assert metrics["correction/effective_sample_share"] == 0.0


@pytest.mark.parametrize("name", CORRECTIONS)
def test_products_beyond_floating_point(name: CorrectionName) -> None:
    """e^±4000 is neither a float32 nor a float64; the bounds are reached all the same."""
    new_BR = torch.tensor([[-1.0] * 4, [-1001.0] * 4], requires_grad=True)
    old_BR = torch.tensor([[-1001.0] * 4, [-1.0] * 4])
    weights = rollout_weights(name, new_BR, old_BR, torch.ones(2, 4, dtype=torch.bool), HIGH, LOW)
    largest = HIGH if name.endswith("tis") else 0.0
    assert weights.weights_BR.tolist() == [[pytest.approx(largest)] * 4, [0.0] * 4]
    metrics = correction_metrics(weights)
    assert metrics["correction/ratio_max"] == pytest.approx(math.exp(20.0), rel=1e-6)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_nan_at_a_valid_token_is_not_hidden(name: CorrectionName) -> None:
    mask_BR = torch.ones(1, 2, dtype=torch.bool)
    weights = rollout_weights(name, torch.zeros(1, 2), torch.tensor([[math.nan, 0.0]]), mask_BR, HIGH, LOW)
    assert weights.weights_BR[0, 0].isnan()
    assert weights.keep_B.all()


log_prob = st.floats(-4, 0, width=32)
rows_with_owners = st.lists(
    st.tuples(st.lists(st.tuples(log_prob, log_prob), max_size=WIDTH), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("name", CORRECTIONS)
@given(drawn=rows_with_owners)
@settings(deadline=None, max_examples=12)
def test_metrics_of_rows_anywhere(
    name: CorrectionName, drawn: list[tuple[list[tuple[float, float]], int]]
) -> None:
    rows = [row for row, _ in drawn]
    columns = _columns(rows)
    whole = rollout_weights(name, *columns, high=HIGH, low=LOW)
    metrics = correction_metrics(whole)
    everywhere = on_ranks(
        cut([owner for _, owner in drawn]),
        lambda part, across: correction_metrics(
            rollout_weights(name, *(column[part] for column in columns), high=HIGH, low=LOW), across
        ),
    )
    for part in everywhere:
        assert part == pytest.approx(metrics, rel=1e-6, abs=1e-12)
    products = [math.prod(math.exp(new - old) for new, old in row) for row in rows]
    roots = [product ** (1 / max(len(row), 1)) for product, row in zip(products, rows, strict=True)]
    ratios = [math.exp(new - old) for row in rows for new, old in row]
    on_a_bound = [abs(x / bound - 1) < 1e-9 for x in [*products, *roots, *ratios] for bound in (LOW, HIGH)]
    if not any(on_a_bound):
        assert metrics == pytest.approx(_expected_metrics(name, rows), rel=1e-6, abs=1e-9)


def test_icepop_keeps_tokens_on_its_bounds_and_none_beyond() -> None:
    ratios = [[0.5, 2.0, 0.499], [2.001, 1.0, 0.0]]
    mask_BR = response_mask(torch.tensor([3, 2]), 3)
    new_BR = torch.tensor(ratios, dtype=torch.float64).log()
    weights = rollout_weights("icepop", new_BR, torch.zeros_like(new_BR), mask_BR, high=2.0, low=0.5)
    assert weights.weights_BR.tolist() == [pytest.approx([0.5, 2.0, 0.0]), pytest.approx([0.0, 1.0, 0.0])]
    assert correction_metrics(weights)["correction/dropped_fraction"] == pytest.approx(2 / 5)
    unbounded = rollout_weights("icepop", new_BR, torch.zeros_like(new_BR), mask_BR, high=2.0)
    assert unbounded.weights_BR[0].tolist() == pytest.approx([0.5, 2.0, 0.499])


@given(drawn=st.lists(st.tuples(log_prob, log_prob, log_prob, st.floats(-2, 2)), min_size=1, max_size=12))
@settings(deadline=None, max_examples=60)
def test_truncated_sampling_with_a_high_cap_is_decoupled_ppo(drawn: list[tuple[float, ...]]) -> None:
    """The mean of pi_prox/pi_behav·min(u·A, clip(u)·A), u = pi/pi_prox, of arXiv 2505.24298, section 5.2."""
    new_BR, old_BR, behaviour_BR, advantages_BR = torch.tensor(drawn, dtype=torch.float64).T.unsqueeze(1)
    mask_BR = torch.ones_like(new_BR, dtype=torch.bool)
    weights = rollout_weights("token_tis", old_BR, behaviour_BR, mask_BR, high=1e9)
    loss = policy_loss(
        new_BR, old_BR, advantages_BR, mask_BR, clip_low=0.2, clip_high=0.3, weights_BR=weights.weights_BR
    )
    total = 0.0
    for new, proximal, behaviour, advantage in drawn:
        ratio = math.exp(new) / math.exp(proximal)
        clipped = min(max(ratio, 0.8), 1.3)
        total += math.exp(proximal) / math.exp(behaviour) * min(ratio * advantage, clipped * advantage)
    metrics = loss.stats.metrics(len(drawn))
    assert metrics["actor/policy_loss"] == pytest.approx(-total / len(drawn), rel=1e-9, abs=1e-12)


def test_names_and_shapes_that_make_no_sense_are_refused() -> None:
    columns = _columns(ROWS)
    with pytest.raises(AssertionError, match="no rollout correction is called 'icecube'"):
        rollout_weights("icecube", *columns, high=2.0)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"rollout_log_probs_BR.*\(6, 1\)"):
        rollout_weights("token_tis", columns[0], columns[1][:, :1], columns[2], high=2.0)
