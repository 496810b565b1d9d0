"""Statistics over all rows of a batch that is distributed over ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class Across:
    """Element-wise sums and maxima over the ranks of a group (collective); without one, this process holds all rows."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Tensor, operation: object) -> Tensor:
        if self._group is None or self._group.size() == 1:
            return values
        total = values.clone()
        dist.all_reduce(total, op=operation, group=self._group)  # type: ignore[arg-type]
        return total


ONE_PROCESS = Across()
