"""Places of a model's outputs among the rows of a micro-batch, which the model sees packed, and in parts on many ranks.

Shapes: B rows, R wanted positions of each, N outputs that this rank computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Places of this rank's outputs among the entries of [B, R]; context-parallel ranks have those of other entries."""

    shape: tuple[int, ...]
    """(B, R), or the shape of a selection of these entries."""
    entries_N: Tensor
    """Index of the flattened entry of each output, int64."""
    group: dist.ProcessGroup
    """Ranks with the other outputs, which call the same methods."""

    @classmethod
    def everywhere(cls, shape: tuple[int, ...], group: dist.ProcessGroup) -> Places:
        """Return the places of outputs of all entries, in order."""
        return cls(shape, torch.arange(math.prod(shape)), group)

    def spread(self, values_N: Tensor) -> Tensor:
        """Return the values [N, ...] of all ranks at their places, [B, R, ...]; entries without an output are zero.

        Differentiable: all ranks compute the same loss, and each gets the gradient of its own values.
        """
        whole = values_N.new_zeros(math.prod(self.shape), *values_N.shape[1:])
        whole = whole.index_copy(0, self.entries_N, values_N)
        if self.group.size() > 1:
            whole = _Sum.apply(whole, self.group)
        return whole.view(*self.shape, *values_N.shape[1:])

    def of(self, values_BR: Tensor) -> Tensor:
        """Return the values of this rank's entries, [N, ...]."""
        return values_BR.flatten(0, len(self.shape) - 1)[self.entries_N]

    def __getitem__(self, index: Any) -> tuple[Places, Tensor]:
        """Return the places of a selection of the entries, such as `[:, :-1]`, and the indices of its outputs among N."""
        outputs = self.entries_N.new_full((math.prod(self.shape),), -1)
        outputs[self.entries_N] = torch.arange(len(self.entries_N), device=outputs.device)
        selected = outputs.view(self.shape)[index]
        entries = (selected.flatten() >= 0).nonzero().flatten()
        return Places(tuple(selected.shape), entries, self.group), selected.flatten()[entries]


class _Sum(torch.autograd.Function):
    """The sum over a group whose ranks all compute the same function of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
