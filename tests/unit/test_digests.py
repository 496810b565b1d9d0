"""Digests of boxes: any flipped bit and any swap changes them; the memory layout does not."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from hybridengine.weights.digests import DIGEST_SIZE, digests

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
DTYPES = list(WORDS)
SHAPES = [(1,), (7,), (8,), (1, 4), (4, 1), (3, 4), (4, 3), (5, 5), (2, 3, 4), (2, 2, 3)]
"""Shapes whose rows are whole 8-byte words in both types, and others; one row, one column, one dimension, three."""


def box(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random bits as a contiguous tensor, with NaNs, infinities and negative zeros among them."""
    word = WORDS[dtype]
    limits = torch.iinfo(word)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=word).view(dtype)


def digest(view: Tensor) -> tuple[int, ...]:
    (found,) = digests([view]).tolist()
    return tuple(found)


def flipped(tensor: Tensor, element: int, bit: int) -> Tensor:
    """Return a copy with one bit of one element changed."""
    copy = tensor.clone()
    words = copy.view(-1).view(WORDS[tensor.dtype])
    num_bits = 8 * tensor.element_size()
    words[element] ^= (1 << bit) - ((1 << num_bits) if bit == num_bits - 1 else 0)
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_flipped_bit_changes_both_sums(shape: tuple[int, ...], dtype: torch.dtype):
    original = box(shape, dtype)
    places = list(product(range(original.numel()), range(8 * original.element_size())))
    found = digests([flipped(original, *place) for place in places])
    for place, both in zip(places, (found != digests([original])).tolist(), strict=True):
        assert all(both), place


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_swap_of_two_elements_changes_it(shape: tuple[int, ...], dtype: torch.dtype):
    original = box(shape, dtype)
    bits = original.view(-1).view(WORDS[dtype])
    expected = digest(original)
    assert len(bits.unique()) == len(bits), "choose another seed"
    for one, other in combinations(range(original.numel()), 2):
        changed = original.clone()
        words = changed.view(-1).view(WORDS[dtype])
        words[one], words[other] = bits[other].clone(), bits[one].clone()
        assert digest(changed) != expected, (one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [3, 4, 5, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_swap_of_rows_or_columns_changes_it(dtype: torch.dtype, columns: int, dim: int):
    original = box((6, columns), dtype)
    expected = digest(original)
    for one in range(original.size(dim)):
        for other in range(one):
            order = list(range(original.size(dim)))
            order[one], order[other] = other, one
            changed = original.index_select(dim, torch.tensor(order))
            assert digest(changed) != expected, (one, other)


def test_a_box_that_has_moved_is_another():
    """A wrong offset has this effect: the same rows, shifted by one."""
    parameter = box((9, 8), torch.float32)
    assert len({digest(parameter[first : first + 4]) for first in range(6)}) == 6
    assert len({digest(parameter[:, first : first + 4]) for first in range(5)}) == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 3, 4, 5, 8])
def test_the_memory_layout_does_not_matter(dtype: torch.dtype, columns: int):
    original = box((4, columns), dtype)
    views = [original]
    for offset in (0, 1, 2, 3):
        flat = torch.zeros(offset + original.numel(), dtype=dtype)
        views.append(flat[offset:].view(original.shape))
        wide = torch.zeros(5, offset + columns + 1, dtype=dtype)
        views.append(wide[1:, offset : offset + columns])
        even = torch.zeros(4, offset + columns + columns % 2 + 8, dtype=dtype)
        views.append(even[:, offset : offset + columns])
    views.append(torch.zeros(columns, 4, dtype=dtype).t())
    words = WORDS[dtype]
    for view in views[1:]:
        view.copy_(original)
        assert torch.equal(view.contiguous().view(words), original.view(words)), "a copy keeps all bits"
    found = digests(views)
    assert found.shape == (len(views), DIGEST_SIZE)
    assert found.dtype is torch.int64
    assert {tuple(one) for one in found.tolist()} == {digest(original)}


def test_the_shape_counts_where_the_bits_do_not():
    original = box((4, 6), torch.float32)
    assert digest(original) != digest(original.view(6, 4))


def test_it_is_the_sum_that_the_docstring_says():
    """Words of one column each are read as signed numbers, modulo 2^64."""
    words = [[5, -3, 2**31 - 1], [-(2**31), 7, 0]]
    matrix = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    rows, columns = [sum(row) for row in words], [sum(column) for column in zip(*words, strict=True)]
    assert digest(matrix) == (signed(sum_of_mixed(columns)), signed(sum_of_mixed(rows)))


def sum_of_mixed(sums: list[int]) -> int:
    return sum(split_mix_64((place + 1) * 0x9E3779B97F4A7C15 + value) for place, value in enumerate(sums))


def split_mix_64(number: int) -> int:
    """Return the output function of SplitMix64, as its authors define it."""
    number %= 2**64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_two_flipped_bits_change_it(dtype: torch.dtype):
    """Signs and exponents, where plain sums would cancel; all pairs of bits of two rows and two columns of words."""
    original = box((2, 16 // dtype.itemsize), dtype)
    expected, num_bits = digests([original]), 8 * dtype.itemsize
    places = [(element, bit) for element in range(original.numel()) for bit in range(num_bits - 9, num_bits)]
    for number, one in enumerate(places[1:], start=1):
        changed = flipped(original, *one)
        found = digests([flipped(changed, *other) for other in places[:number]])
        assert (found != expected).any(dim=1).all(), one


def signed(number: int) -> int:
    """Return a number modulo 2^64 as an int64."""
    return (number + 2**63) % 2**64 - 2**63
