"""Supports of draws as words, and the bits of a shard of the vocabulary that a rank makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.backends.supports import Supports
from hybridengine.rollouts.drawn import DrawnSupports
from hybridengine.rows.supports import WHOLE, num_mask_words, support_columns, support_of, support_row


@st.composite
def vocabularies(draw: st.DrawFn) -> tuple[int, list[list[set[int]]]]:
    """Return the size of a vocabulary, and the drawable tokens of each response token of some rows."""
    size = draw(st.integers(1, 200))
    one = st.one_of(
        st.sets(st.integers(0, size - 1), min_size=1, max_size=6),
        st.sets(st.integers(0, size - 1), min_size=1),
        st.just({*range(size)}),
    )
    return size, draw(st.lists(st.lists(one, max_size=4), min_size=1, max_size=3))


@given(vocabularies(), st.data())
def test_every_shard_finds_the_tokens_that_could_be_drawn(
    vocabulary: tuple[int, list[list[set[int]]]], data: st.DataObject
) -> None:
    size, rows = vocabulary
    width = max(1, *map(len, rows))
    words = [[support_of(np.array(sorted(one)), size) for one in row] for row in rows]
    assert all(len(one) <= num_mask_words(size) for row in words for one in row)
    columns = support_columns([support_row(row) for row in words], [*map(len, rows)], width)
    supports = Supports.of_columns(columns)
    assert supports is not None
    first = data.draw(st.integers(0, size - 1))
    num_tokens = data.draw(st.integers(1, size - first))
    flat = Supports(supports.words_M, supports.begins.flatten(), supports.sizes.flatten())
    begin = data.draw(st.integers(0, len(rows) * width - 1))
    block = slice(begin, data.draw(st.integers(begin + 1, len(rows) * width)))
    outside = flat.outside(block, first, num_tokens, size)
    everything = {*range(size)}
    every = [one for row in rows for one in [*row, *[everything] * (width - len(row))]][block]
    if outside is None:
        assert all(one == everything for one in every)
        return
    expected = [[token not in one for token in range(first, first + num_tokens)] for one in every]
    assert outside.tolist() == expected


def test_a_support_takes_the_smaller_of_ids_and_bits() -> None:
    """Of 151,936 tokens, as Qwen's: 4 bytes for each of up to 4,747 tokens, or 18,992 bytes."""
    size = 151_936
    for count, num_bytes in (
        (1, 4),
        (50, 200),
        (4_747, 18_988),
        (4_748, 18_992),
        (151_935, 18_992),
        (size, 0),
    ):
        assert support_of(np.arange(count), size).nbytes == num_bytes


@given(st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=6))
def test_drawn_supports_are_those_of_each_token(given_words: list[list[int]]) -> None:
    supports = [np.array(words, dtype=np.int32) for words in given_words]
    found = DrawnSupports.of(supports).each(len(supports))
    assert [*map(list, found)] == given_words


def test_without_words_all_tokens_are_drawn_from_the_whole_vocabulary() -> None:
    assert [*map(list, DrawnSupports.of(()).each(2))] == [[], []]
    sizes = {"support_sizes": torch.zeros(1, 2, dtype=torch.int64), "support_words": torch.from_numpy(WHOLE)}
    supports = Supports.of_columns(sizes)
    assert supports is not None
    assert supports.outside(slice(0, 1), 0, 4, 4) is None
    assert Supports.of_columns({}) is None


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64])
def test_masks_have_a_bit_for_each_token(size: int) -> None:
    words = support_of(np.array([size - 1]), size)
    if num_mask_words(size) > 1:
        assert words.tolist() == [size - 1]
    elif size > 1:
        assert int(words[0]) % 2**32 == 1 << (size - 1)
