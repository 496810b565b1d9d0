"""Digests of boxes of weights: equal bits at equal positions give equal digests, on any device and memory layout.

A box is read as a matrix x of integers, its last dimension as columns. With a mixing function h over 64-bit numbers in
which every bit has equal influence, and a number c_k for every position k, modulo 2^64:

    (sum_j h(c_j + sum_i x_ij),  sum_i h(c_i + sum_j x_ij))

A flipped bit changes the sums of its row and column, and h maps different numbers to different values: each flipped bit
changes both parts. Sums of rows and columns read the memory about twice, without a copy; the rest is cheap. Errors are
missed only if they cancel in every row and every column: at least four equal ones at the corners of a rectangle. Digests
detect faults; they do not protect against deliberate forgery.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

DIGEST_SIZE = 2
"""Number of integers in a digest."""

_GOLDEN = -7046029254386353131
"""2^64 divided by the golden ratio, as a signed number, whose multiples are evenly spread."""
_MIX = ((30, -4658895280553007687), (27, -7723592293110705685))
"""(shift, odd factor) of SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014), with _LAST_SHIFT."""
_LAST_SHIFT = 31
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(views: Sequence[Tensor]) -> Tensor:
    """Return the digest of each view. Shapes: [len(views), 2] int64, on the device of the views."""
    sums = []
    for view in views:
        words = _words(view)
        sums += [words.sum(dim=0, dtype=torch.int64), words.sum(dim=1, dtype=torch.int64)]
    sizes = [len(part) for part in sums]
    places = torch.cat([_places(size, view.device) for size in sizes])
    # In one batch: each view has few sums, and launching operations would take most of the time.
    totals = _mixed(torch.cat(sums) + places).cumsum(0)
    ends = totals[torch.tensor(sizes).cumsum(0).to(view.device) - 1]
    return torch.diff(ends, prepend=ends.new_zeros(1)).view(-1, DIGEST_SIZE)


def _words(view: Tensor) -> Tensor:
    """Return a view as a matrix of the widest integers that its shape allows, whatever its memory layout."""
    columns, size = view.size(-1), view.element_size()
    matrix = view.reshape(-1, columns)
    if columns * size % 8 or matrix.size(0) == 1:
        return matrix.view(_INTEGERS[size])
    strides_fit = all(stride * size % 8 == 0 for stride in matrix.stride()[:-1]) and matrix.stride(-1) == 1
    if not strides_fit or matrix.storage_offset() * size % 8:
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(torch.int64)


def _mixed(numbers: Tensor) -> Tensor:
    """Return a bijection of 64-bit numbers in which every input bit changes about half of the output bits."""
    for shift, factor in _MIX:
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, _LAST_SHIFT)


def _shifted(numbers: Tensor, shift: int) -> Tensor:
    """Return the numbers shifted right as unsigned integers."""
    return (numbers >> shift) & ((1 << (64 - shift)) - 1)


@lru_cache(maxsize=512)
def _places(count: int, device: torch.device) -> Tensor:
    """Return a distinct number for each position."""
    return torch.arange(1, count + 1, device=device) * _GOLDEN
