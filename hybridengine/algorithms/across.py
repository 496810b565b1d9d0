"""Statistics over all rows of a batch whose rows are shared out among ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class Across:
    """Sums and maxima over the ranks of a group, element by element and the same on all of them; collective.

    Without a group, all rows are in this process.
    """

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
