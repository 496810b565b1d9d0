"""Mini-batches: every row once, the same rows for any number of replicas, and others in each epoch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.rows.micro_batches import draw_mini_batches


def drawn(num_rows: int, replicas: int, count: int, unit: int, seed: int) -> list[set[int]]:
    """Return the rows of each mini-batch, over all replicas."""
    found = [set[int]() for _ in range(count)]
    for part in torch.arange(num_rows).tensor_split(replicas):
        for rows, own in zip(found, draw_mini_batches(part, count, unit, seed), strict=True):
            rows |= set(part[own].tolist())
    return found


@settings(max_examples=30)
@given(
    shares=st.integers(1, 5),
    count=st.integers(1, 6),
    unit=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**62),
)
def test_they_do_not_depend_on_the_number_of_replicas(shares: int, count: int, unit: int, seed: int) -> None:
    num_rows = 12 * shares * count * unit
    one = drawn(num_rows, 1, count, unit, seed)
    assert sorted(row for rows in one for row in rows) == list(range(num_rows))
    assert {len(rows) for rows in one} == {num_rows // count}
    assert all({row ^ (unit - 1) for row in rows} == rows for rows in one)  # pairs stay together
    for replicas in (2, 3, 4, 6, 12):
        assert drawn(num_rows, replicas, count, unit, seed) == one


@given(
    first=st.integers(0, 30), num_rows=st.integers(1, 40), count=st.integers(1, 8), seed=st.integers(0, 99)
)
def test_any_number_of_rows_is_split_evenly(first: int, num_rows: int, count: int, seed: int) -> None:
    numbers = torch.arange(first, first + num_rows)
    parts = draw_mini_batches(numbers, count, 1, seed)
    assert sorted(torch.cat(parts).tolist()) == list(range(num_rows))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [2, 4])
def test_every_row_meets_every_mini_batch_equally_often(count: int) -> None:
    numbers, draws = torch.arange(8), 1000
    times = torch.zeros(8, count)
    for seed in range(draws):
        for number, rows in enumerate(draw_mini_batches(numbers, count, 1, seed)):
            times[rows, number] += 1
    assert ((times / draws - 1 / count).abs() < 0.06).all()


def test_epochs_and_updates_differ() -> None:
    assert len({str(drawn(64, 1, 4, 1, seed)) for seed in range(20)}) == 20
