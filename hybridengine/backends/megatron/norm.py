"""RMS norm in few passes over memory, for CPUs, where torch puts it together from a power, a mean and three products.

Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.

Shapes: H = hidden_size (of a head's norm, head_dim).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RootMeanSquareNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) · weight over the last dim.

    Stands where Megatron-core has its own wrapper of `nn.RMSNorm`; the weight has the same name.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] of [..., H]."""
        # Elsewhere torch's own is fused, or more exact.
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return super().forward(x)
        return _RootMeanSquareNorm.apply(x, self.weight, self.eps)  # type: ignore[return-value]


class _RootMeanSquareNorm(torch.autograd.Function):
    """The same, and its gradient: with n = x / rms, dx = (g·w - n · mean(g·w·n)) / rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse_rms = squares.div_(x.size(-1)).add_(eps).rsqrt_()
        normed = x * inverse_rms
        ctx.save_for_backward(normed, inverse_rms, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        normed, inverse_rms, weight = ctx.saved_tensors
        products = (gradient * normed).reshape(-1, weight.size(0))
        mean = torch.mv(products, weight).view_as(inverse_rms).div_(normed.size(-1))
        of_x = (gradient * weight).addcmul_(normed, mean, value=-1).mul_(inverse_rms)
        return of_x, products.sum(0), None
