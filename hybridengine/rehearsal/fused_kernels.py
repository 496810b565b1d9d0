"""Attention and norms with the memory of a GPU's fused kernels, in place of those that keep intermediate results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridengine.backends.megatron.attention import PackedAttention
from hybridengine.rehearsal.replacing import all_replaced


class _Attention(torch.autograd.Function):
    """Shapes of flash attention: it keeps its inputs, its output, and one float32 number for each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        output = query.new_empty(*query.shape[:-1], value.size(-1))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


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
def fused_kernels() -> Iterator[None]:
    """Let layers without Transformer Engine need the memory of those with it while the context is open."""

    own = PackedAttention.forward

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any) -> Tensor:
        if layer._context.size() > 1:  # whose ranks exchange keys and values
            return own(layer, query, key, value, *more, **named)
        return _Attention.apply(query, key, value).flatten(-2)  # type: ignore[no-any-return]

    def normalize(layer: Any, rows: Tensor) -> Tensor:
        return _Norm.apply(rows, layer.weight)  # type: ignore[no-any-return]

    with all_replaced((PackedAttention, "forward", attend), (torch.nn.RMSNorm, "forward", normalize)):
        yield
