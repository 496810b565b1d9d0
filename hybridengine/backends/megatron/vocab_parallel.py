"""Log-probabilities and entropy of a vocabulary that is sharded over tensor-parallel ranks, with an explicit group.

Megatron-core's own vocab-parallel cross entropy reads its group from global state, and knows no padding.

Shapes: B sequences, T positions, W = padded vocabulary / t.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_log_probs(
    logits_BTW: Tensor,
    targets_BT: Tensor,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(log-probability of each target, entropy) under softmax(logits / temperature), both [B, T] float32.

    Columns at or beyond `vocab_size` are padding and get probability zero. Differentiable in the logits.
    """
    return _LogProbs.apply(logits_BTW, targets_BT, vocab_size, group, temperature)  # type: ignore[no-any-return]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits_BTW: Tensor,
        targets_BT: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        width = logits_BTW.size(-1)
        first = group.rank() * width
        scaled = logits_BTW.float() / temperature
        valid = max(0, min(width, vocab_size - first))
        scaled[..., valid:] = float("-inf")
        largest = scaled.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        scaled = scaled - largest.unsqueeze(-1)
        local = targets_BT - first
        here = (local >= 0) & (local < width)
        column = local.clamp(0, width - 1).unsqueeze(-1)
        exponentials = scaled.exp()
        weighted = (exponentials[..., :valid] * scaled[..., :valid]).sum(dim=-1)
        target = scaled.gather(-1, column).squeeze(-1).masked_fill(~here, 0.0)
        sums = torch.stack([exponentials.sum(dim=-1), weighted, target])
        dist.all_reduce(sums, group=group)
        total, weighted, target = sums
        log_total = total.log()
        mean = weighted / total
        ctx.save_for_backward(scaled, log_total, mean, column, here)
        ctx.temperature, ctx.valid, ctx.dtype = temperature, valid, logits_BTW.dtype
        return target - log_total, log_total - mean

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scaled, log_total, mean, column, here = ctx.saved_tensors
        probs = (scaled - log_total.unsqueeze(-1)).exp()
        # d log p(y) / dz = onehot(y) - p;  dH / dz = -p (z - E[z])
        grad = -probs * grad_log_probs.unsqueeze(-1)
        grad.scatter_add_(-1, column, (grad_log_probs * here).unsqueeze(-1))
        if grad_entropy is not None:
            spread = (scaled - mean.unsqueeze(-1))[..., : ctx.valid]
            grad[..., : ctx.valid] -= probs[..., : ctx.valid] * spread * grad_entropy.unsqueeze(-1)
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None
