"""Norms with the memory of a GPU's fused kernel, in place of torch's, which keeps intermediate results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridengine.rehearsal.replacing import replaced


class _Norm(torch.autograd.Function):
    """Shapes of a fused norm: it keeps its input, and one float32 number for each row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, weight, rows.new_empty(rows.shape[:-1], dtype=torch.float32))
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:2])


@contextmanager
def fused_norms() -> Iterator[None]:
    """Let layers without Transformer Engine need the memory of those with it while the context is open.

    Their attention does already: torch's kernel keeps its inputs, its output, and one float32 number for each query.
    """

    def normalize(layer: Any, rows: Tensor) -> Tensor:
        return _Norm.apply(rows, layer.weight)  # type: ignore[no-any-return]

    with replaced(torch.nn.RMSNorm, "forward", normalize):
        yield
