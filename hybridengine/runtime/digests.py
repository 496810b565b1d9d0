"""Digests of boxes of weights: equal bits at equal places have equal digests, on any device and in any memory layout.

For a box read as a matrix x of integers (its last dimension as columns), modulo 2^64 and with odd weights v, w:

    (sum_ij w_j x_ij,  sum_ij v_i x_ij)

One flipped bit changes both sums, because an odd weight times a power of two is never 0. Two reductions cost about two
readings of the memory, and no copy. They find faults; they are no defence against somebody who wants to forge weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

DIGEST_SIZE = 2
"""Numbers of a digest."""

_MULTIPLIER = (
    -7046029254386353131
)  # 2^64 divided by the golden ratio, as a signed number: odd, bits well mixed
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(views: Sequence[Tensor]) -> Tensor:
    """Digest of each view. Shapes: [len(views), 2] int64, on the device of the views."""
    return torch.stack([_digest(view) for view in views])


def _digest(view: Tensor) -> Tensor:
    words = _words(view)
    columns, rows = words.sum(dim=0, dtype=torch.int64), words.sum(dim=1, dtype=torch.int64)
    return torch.stack([(sums * _weights(len(sums), view.device)).sum() for sums in (columns, rows)])


def _words(view: Tensor) -> Tensor:
    """A view as a matrix of the widest integers that its shape allows; the shape alone decides, not the memory."""
    columns, size = view.size(-1), view.element_size()
    matrix = view.reshape(-1, columns)
    if columns * size % 8 or matrix.size(0) == 1:
        return matrix.view(_INTEGERS[size])
    strides_fit = all(stride * size % 8 == 0 for stride in matrix.stride()[:-1]) and matrix.stride(-1) == 1
    if not strides_fit or matrix.storage_offset() * size % 8:
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(torch.int64)


@lru_cache(maxsize=512)
def _weights(count: int, device: torch.device) -> Tensor:
    """Odd, different weights."""
    return (2 * torch.arange(count, device=device) + 1) * _MULTIPLIER
