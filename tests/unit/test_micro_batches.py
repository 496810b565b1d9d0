"""Micro-batches compared with their definition, and with the best division found by trying all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from hybridengine.errors import ConfigError, ProtocolError
from hybridengine.rows.balance import balance_rows
from hybridengine.rows.micro_batches import cut_rows, cut_whole_rows, gather_rows, with_empty_rows

row_counts = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def fewest(counts: list[int], max_tokens: int) -> int:
    """Return the least number of micro-batches, by trying every division of the rows."""

    def fits(rest: list[int], room: list[int]) -> bool:
        if not rest:
            return True
        tried = set()
        for place, left in enumerate(room):
            if left >= rest[0] and left not in tried:
                tried.add(left)
                if fits(rest[1:], [*room[:place], left - rest[0], *room[place + 1 :]]):
                    return True
        return False

    ordered = sorted(counts, reverse=True)
    return next(number for number in range(1, len(counts) + 1) if fits(ordered, [max_tokens] * number))


@given(row_counts, st.integers(0, 200))
@settings(max_examples=300, deadline=None)
@example([22, 46, 43, 36, 25, 25, 4, 7, 48, 41, 3, 34, 36, 5], 60)
@example([1], 0)
def test_every_row_once_within_the_limit_and_evenly(counts: list[int], room: int) -> None:
    """Two micro-batches differ by at most the longest row."""
    max_tokens = max(counts) + room
    batches = balance_rows(counts, max_tokens)
    assert sorted(row for rows in batches for row in rows) == list(range(len(counts)))
    assert all(rows and rows == sorted(rows) for rows in batches)
    loads = sorted(sum(counts[row] for row in rows) for rows in batches)
    assert loads[-1] <= max_tokens
    assert loads[-1] - loads[0] <= max(counts)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(0, 60))
@settings(max_examples=150, deadline=None)
def test_there_is_at_most_one_micro_batch_more_than_needed(counts: list[int], room: int) -> None:
    max_tokens = max(counts) + room
    number = fewest(counts, max_tokens)
    assert number <= len(balance_rows(counts, max_tokens)) <= number + 1


def test_equal_rows_are_dealt_evenly() -> None:
    assert sorted(map(len, balance_rows([10] * 12, 30))) == [3, 3, 3, 3]
    assert sorted(map(len, balance_rows([10] * 10, 40))) == [3, 3, 4]
    assert balance_rows([10] * 12, 120) == [list(range(12))]


def test_short_rows_fill_up_what_a_long_one_leaves() -> None:
    assert sorted(balance_rows([100, 5, 5, 5, 5], 120)) == [[0, 1, 2, 3, 4]]
    assert sorted(balance_rows([100, 5, 5, 5, 5], 100)) == [[0], [1, 2, 3, 4]]


def test_thousands_of_rows_that_fill_half_a_micro_batch_take_no_time() -> None:
    assert len(balance_rows([51] * 4000, 100)) == 4000


def test_division_does_not_depend_on_anything_but_the_counts() -> None:
    counts = [7, 3, 9, 3, 3, 12, 1, 7]
    assert balance_rows(counts, 24) == balance_rows(tuple(counts), 24)
    assert balance_rows([], 8) == []
    assert balance_rows([0, 0], 8) == [[0, 1]]


def test_a_row_beyond_the_limit_is_refused_with_the_least_limit_that_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        balance_rows([3, 17, 5], 16)
    assert str(caught.value) == (
        "a row of 17 tokens exceeds micro_batch_tokens=16; raise micro_batch_tokens to at least 17"
    )
    assert balance_rows([3, 17, 5], 17)


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 4, 1)])
def test_a_column_without_a_value_for_each_response_token_is_named(shape: tuple[int, ...]) -> None:
    columns = {
        "tokens": torch.zeros(2, 8, dtype=torch.int64),
        "prompt_lengths": torch.tensor([4, 4]),
        "response_lengths": torch.tensor([1, 4]),
        "advantages": torch.zeros(shape),
        "right": torch.zeros(2, 5),
    }
    rows = TensorDict(columns, batch_size=[2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ProtocolError, match=rf"column 'advantages' has the shape .{shape[0]}.*up to 4 response tokens"
    ):
        cut_rows(rows, 8, ["right", "advantages"])
    assert len(cut_rows(rows, 8, ["right"])) == 2


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    data=st.data(),
    keeps=st.booleans(),
    trains=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_masks_leave_out_rows_that_are_not_kept_and_tokens_that_are_not_trained(
    lengths: list[int], data: st.DataObject, keeps: bool, trains: bool
) -> None:
    width, num_rows = 5, len(lengths)
    flags = st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)
    keep = data.draw(flags)
    trained = [data.draw(st.lists(st.booleans(), min_size=width, max_size=width)) for _ in lengths]
    columns = {
        "tokens": torch.zeros(num_rows, 2 + width, dtype=torch.int64),
        "prompt_lengths": torch.full((num_rows,), 2),
        "response_lengths": torch.tensor(lengths),
    }
    columns |= {"keep": torch.tensor(keep)} if keeps else {}
    columns |= {"trained": torch.tensor(trained)} if trains else {}
    found = cut_rows(TensorDict(columns, batch_size=[num_rows]), data.draw(st.integers(7, 20)))  # pyright: ignore[reportArgumentType]
    assert sorted(row for part in found for row in part.rows) == list(range(num_rows))
    for part in found:
        for row, mask in zip(part.rows, part.columns["mask"].tolist(), strict=True):
            assert len(mask) == max(1, *(lengths[other] for other in part.rows))
            assert mask == [
                place < lengths[row] and (keep[row] or not keeps) and (trained[row][place] or not trains)
                for place in range(len(mask))
            ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_whole_rows_are_cut_to_the_longest_and_gathered_in_order(lengths: list[int], room: int) -> None:
    """Empty rows have one masked position; results beyond a row's length are zero."""
    width = 9
    values = torch.arange(1.0, len(lengths) * width + 1).view(-1, width)
    batch = TensorDict({"lengths": torch.tensor(lengths), "values": values}, batch_size=[len(lengths)])
    max_tokens = max(1, *lengths) + room
    micro = cut_whole_rows(batch, max_tokens, ["values"])
    for part in micro:
        longest = max(1, *(lengths[row] for row in part.rows))
        assert part.columns["mask"].tolist() == [
            [place < lengths[row] for place in range(longest)] for row in part.rows
        ]
        assert torch.equal(part.columns["values"], values[part.rows, :longest])
        assert part.columns["lengths"].tolist() == [max(1, lengths[row]) for row in part.rows]
        assert part.columns["lengths"].sum() <= max_tokens
    expected = [
        [value if place < length else 0.0 for place, value in enumerate(row)]
        for row, length in zip(values.tolist(), lengths, strict=True)
    ]
    gathered = gather_rows([(part, part.columns["values"]) for part in micro], len(lengths), width)
    assert gathered.tolist() == expected


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 2), (2, 2), (5, 5)])
def test_empty_rows_fill_up_what_is_missing(num_rows: int, expected: int) -> None:
    batch = TensorDict({"lengths": torch.tensor([3, 4]), "values": torch.ones(2, 4)}, batch_size=[2])
    filled = with_empty_rows(batch, num_rows)
    assert filled["lengths"].tolist() == [3, 4, *[0] * (expected - 2)]
    assert filled["values"].tolist() == [[1.0] * 4] * 2 + [[0.0] * 4] * (expected - 2)
