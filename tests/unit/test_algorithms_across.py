"""Ranks that share a batch, as threads: other tests compare them with the whole batch in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from hybridengine.algorithms.across import ONE_PROCESS, Across
from hybridengine.algorithms.masking import response_mask, whiten

Part = TypeVar("Part")
Result = TypeVar("Result")


class _Rank(Across):
    """One thread's `Across`: values of all threads meet in `slots`."""

    def __init__(self, rank: int, slots: list[Tensor], barrier: Barrier) -> None:
        super().__init__()
        self._rank, self._slots, self._barrier = rank, slots, barrier

    def sum(self, values: Tensor) -> Tensor:
        return self._met(values, lambda parts: torch.stack(parts).sum(0))

    def max(self, values: Tensor) -> Tensor:
        return self._met(values, lambda parts: torch.stack(parts).amax(0))

    def _met(self, values: Tensor, together: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self._slots[self._rank] = values
        self._barrier.wait()
        result = together(list(self._slots))
        self._barrier.wait()
        return result


def on_ranks(parts: Sequence[Part], function: Callable[[Part, Across], Result]) -> list[Result]:
    """Return `function(part, across)` of every part, one thread each, with an `Across` that joins all parts."""
    barrier = Barrier(len(parts), timeout=20)
    slots = [torch.empty(0)] * len(parts)

    def run(rank: int) -> Result:
        try:
            return function(parts[rank], _Rank(rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))


def cut(owners: Sequence[int]) -> list[list[int]]:
    """Return the row numbers of each rank, given the rank of each row; ranks without rows are included."""
    return [
        [row for row, owner in enumerate(owners) if owner == rank]
        for rank in range(max(owners, default=0) + 1)
    ]


def joined(rows: Sequence[Sequence[int]], parts: Sequence[Tensor]) -> Tensor:
    """Return the results of all ranks in the order of the rows."""
    order = torch.tensor([row for part in rows for row in part], dtype=torch.long)
    return torch.cat(list(parts))[order.argsort()]


def test_sums_and_maxima_of_all_parts_reach_every_rank() -> None:
    parts = [torch.tensor([1.0, -5.0]), torch.tensor([2.0, -7.0]), torch.tensor([4.0, -6.0])]
    results = on_ranks(parts, lambda part, across: (across.sum(part).tolist(), across.max(part).tolist()))
    assert results == [([7.0, -18.0], [4.0, -5.0])] * 3
    assert ONE_PROCESS.sum(parts[0]) is parts[0]
    assert ONE_PROCESS.max(parts[0]) is parts[0]


def test_an_error_on_one_rank_ends_all_of_them() -> None:
    def fail_on_the_second(part: int, across: Across) -> Tensor:
        assert part != 1, "rank 1 fails"
        return across.sum(torch.zeros(()))

    with pytest.raises(BaseException, match=r"rank 1 fails|^$"):
        on_ranks([0, 1, 2], fail_on_the_second)


@pytest.mark.parametrize("owners", [[0, 0, 0, 0, 0], [0, 1, 2, 3, 4], [2, 0, 2, 0, 0], [0, 3, 3, 0, 3]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_whitening_does_not_depend_on_where_rows_are(owners: list[int], dtype: torch.dtype) -> None:
    """[2, 0, 2, 0, 0] leaves rank 1 without rows."""
    mask_BR = response_mask(torch.tensor([4, 0, 1, 3, 4]), 4)
    values_BR = torch.randn(5, 4, generator=torch.Generator().manual_seed(3)).to(dtype) + 5
    values_BR[~mask_BR] = math.nan
    rows = cut(owners)
    parts = on_ranks(rows, lambda part, across: whiten(values_BR[part], mask_BR[part], across=across))
    whole_BR = whiten(values_BR, mask_BR)
    assert whole_BR.dtype == dtype
    torch.testing.assert_close(joined(rows, parts), whole_BR, rtol=1e-6, atol=1e-7)
