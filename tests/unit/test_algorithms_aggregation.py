"""Means over tokens and sequences, compared with loops, for any division of rows into micro-batches and ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.algorithms.losses.aggregation import (
    PER_TOKEN,
    Aggregation,
    LossStats,
    SummedLoss,
    merge_stats,
)
from hybridengine.algorithms.losses.policy import entropy_bonus, kl_loss, policy_loss
from hybridengine.algorithms.masking import response_mask
from tests.unit.test_algorithms_across import on_ranks

WIDTH = 4
ROWS = [[1.0, 2.0, 6.0], [], [-4.0], [0.5, 0.25, 0.0, 1.0]]
AGGREGATIONS = [PER_TOKEN, Aggregation("sequence"), Aggregation("sequence_sum", divisor=WIDTH)]


def global_mean(loss_sum: torch.Tensor, count: int | torch.Tensor) -> torch.Tensor:
    """Return the mini-batch's mean as the trainer forms it: the sum over its number of tokens or sequences."""
    return loss_sum / torch.as_tensor(count).clamp(min=1)


def _columns(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    mask_BR = response_mask(torch.tensor([len(row) for row in rows], dtype=torch.int64), WIDTH)
    padded = [row + [math.nan] * (WIDTH - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.float64).reshape(len(rows), WIDTH), mask_BR


def _mean(rows: list[list[float]], aggregation: Aggregation) -> float:
    """Return the mean as the papers write it; an empty response is not a sequence."""
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if aggregation.name == "token":
        return math.fsum(value for row in rows for value in row) / sum(len(row) for row in rows)
    if aggregation.name == "sequence":
        return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
    return math.fsum(math.fsum(row) / aggregation.divisor for row in rows) / len(rows)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("rows", [ROWS, [[2.0]], [[], []], []], ids=["many", "one", "empty", "none"])
def test_means_against_loops(aggregation: Aggregation, rows: list[list[float]]) -> None:
    losses_BR, mask_BR = _columns(rows)
    losses_BR.requires_grad_()
    loss_sum, count = aggregation.loss_sum(losses_BR, mask_BR), aggregation.count(mask_BR)
    assert global_mean(loss_sum, count).item() == pytest.approx(_mean(rows, aggregation), rel=1e-12)
    expected = sum(map(len, rows)) if aggregation.name == "token" else sum(map(bool, rows))
    assert count.item() == expected
    loss_sum.backward()
    assert losses_BR.grad is not None
    assert not losses_BR.grad[~mask_BR].any()


def test_three_means_by_hand() -> None:
    losses_BR, mask_BR = _columns(ROWS)
    means = [
        global_mean(aggregation.loss_sum(losses_BR, mask_BR), aggregation.count(mask_BR)).item()
        for aggregation in AGGREGATIONS
    ]
    assert means == pytest.approx([6.75 / 8, (3 - 4 + 0.4375) / 3, 6.75 / 4 / 3], rel=1e-12)


def test_padding_rows_change_nothing() -> None:
    """Rows that only pad a batch, or whose reward failed, have no valid token."""
    for aggregation in AGGREGATIONS:
        means = []
        for rows in (ROWS, [*ROWS, [], []]):
            losses_BR, mask_BR = _columns(rows)
            means.append(
                global_mean(aggregation.loss_sum(losses_BR, mask_BR), aggregation.count(mask_BR)).item()
            )
        assert means[0] == means[1]


def test_stats_divide_by_their_own_counts() -> None:
    stats = merge_stats(
        [
            LossStats({"a": torch.tensor(6.0), "b": torch.tensor(6.0)}, counts={"b": torch.tensor(2)}),
            LossStats({"a": torch.tensor(2.0), "b": torch.tensor(3.0)}, counts={"b": torch.tensor(1)}),
        ]
    )
    assert stats.metrics(num_tokens=4) == {"a": 2.0, "b": 3.0}
    assert merge_stats([]).metrics(0) == {}


def test_the_same_loss_twice_cannot_be_added() -> None:
    loss = entropy_bonus(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), 0.1)
    with pytest.raises(AssertionError, match="actor/entropy"):
        _ = loss + loss


def _batch(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs, old and reference ones, advantages, weights [5, B, R], NaN at masked entries, and the mask."""
    mask_BR = response_mask(torch.tensor(lengths, dtype=torch.int64), WIDTH)
    generator = torch.Generator().manual_seed(sum(lengths) + 17 * len(lengths))
    columns = torch.randn(5, len(lengths), WIDTH, dtype=torch.float64, generator=generator) * 0.5
    return columns.masked_fill(~mask_BR, math.nan), mask_BR


def _total(columns: torch.Tensor, mask_BR: torch.Tensor, aggregation: Aggregation) -> SummedLoss:
    new_BR, old_BR, ref_BR, advantages_BR, weights_BR = columns
    loss = policy_loss(
        new_BR,
        old_BR,
        advantages_BR,
        mask_BR,
        dual_clip=1.5,
        weights_BR=weights_BR.abs(),
        aggregation=aggregation,
    )
    loss = loss + kl_loss(new_BR, ref_BR, mask_BR, 0.1, "k3", aggregation)
    return loss + entropy_bonus(-new_BR, mask_BR, 0.05, aggregation)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, WIDTH), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8
    )
)
@settings(deadline=None, max_examples=10)
def test_gradient_and_metrics_do_not_depend_on_how_rows_are_cut(
    aggregation: Aggregation, rows: list[tuple[int, int, int]]
) -> None:
    """Rows are (length, rank, micro-batch); the trainer adds the gradients of all of them."""
    columns, mask_BR = _batch([length for length, _, _ in rows])
    columns.requires_grad_()
    whole = _total(columns, mask_BR, aggregation)
    count = aggregation.count(mask_BR)
    global_mean(whole.loss_sum, count).backward()
    expected = columns.grad
    assert expected is not None

    columns.grad = None
    parts: list[LossStats] = []
    for rank in range(3):
        micro_batches = []
        for number in range(3):
            part = [i for i, (_, owner, micro) in enumerate(rows) if (owner, micro) == (rank, number)]
            loss = _total(columns[:, part], mask_BR[part], aggregation)
            global_mean(loss.loss_sum, count).backward()
            micro_batches.append(loss.stats)
        parts.append(merge_stats(micro_batches))
    torch.testing.assert_close(columns.grad, expected, rtol=1e-6, atol=1e-9)
    num_tokens = int(mask_BR.sum())
    everywhere = on_ranks(parts, lambda part, across: part.over_ranks(across).metrics(num_tokens))
    for metrics in everywhere:
        assert metrics == pytest.approx(whole.stats.metrics(num_tokens), rel=1e-6, abs=1e-9)


def test_reduced_statistics_keep_sums_maxima_and_counts_apart() -> None:
    parts = [
        LossStats(
            {"a": torch.tensor(1.0), "b": torch.tensor(2)}, {"m": torch.tensor(5.0)}, {"b": torch.tensor(3)}
        ),
        LossStats(
            {"a": torch.tensor(10.0), "b": torch.tensor(20)}, {"m": torch.tensor(4.0)}, {"b": torch.tensor(8)}
        ),
    ]
    for stats in on_ranks(parts, lambda part, across: part.over_ranks(across)):
        assert {name: float(value) for name, value in stats.sums.items()} == {"a": 11.0, "b": 22.0}
        assert {name: float(value) for name, value in stats.maxima.items()} == {"m": 5.0}
        assert stats.metrics(5) == {"a": 2.2, "b": 2.0, "m": 5.0}
    assert on_ranks([LossStats()], lambda part, across: part.over_ranks(across).metrics(1)) == [{}]
