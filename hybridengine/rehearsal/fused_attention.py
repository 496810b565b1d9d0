"""Attention with the memory of a GPU's fused kernel, in place of Megatron-core's own, which keeps all scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from hybridengine.rehearsal.replacing import replaced


class _Fused(torch.autograd.Function):
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


@contextmanager
def fused_attention() -> Iterator[None]:
    """Let Megatron-core's layers attend as its Transformer Engine layers do, while the context is open."""

    def forward(
        attention: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any
    ) -> Tensor:
        return _Fused.apply(query, key, value).flatten(-2)  # type: ignore[no-any-return]

    with replaced(DotProductAttention, "forward", forward):
        yield
