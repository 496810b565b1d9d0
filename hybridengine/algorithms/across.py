"""Statistics over all rows of a batch whose rows are shared out among ranks."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Across(Protocol):
    """Puts together what every rank has of the same batch; collective."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, element by element; the same on all of them."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Largest of all ranks, element by element; the same on all of them."""
        ...


class OneProcess:
    """All rows are here."""

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values


ONE_PROCESS = OneProcess()


class AcrossRanks:
    """Rows are shared out among the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Tensor, operation: object) -> Tensor:
        total = values.clone()
        if self._group.size() > 1:
            dist.all_reduce(total, op=operation, group=self._group)  # type: ignore[arg-type]
        return total
