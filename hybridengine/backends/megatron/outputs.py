"""Log-probs, entropies, values and scores of a micro-batch's responses, computed from a model's output.

The vocabulary is sharded over tensor-parallel ranks, whose group is explicit: Megatron-core's vocab-parallel cross
entropy uses a global group and does not support padding.

Shapes: B (b) rows, T (t) positions, r response tokens, W = padded vocabulary / t, N = B·T.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

BLOCK_ENTRIES = 2**19
"""Number of entries in a block on a CPU: 2 MiB in float32."""


def response_log_probs(
    logits_brW: Tensor,
    columns: dict[str, Tensor],
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of each response token, entropy of its distribution), both [b, r] float32.

    The logits are those at `columns["positions"]` [b, r], which predict the tokens. Entries beyond a response are
    undefined; `columns["mask"]` marks the valid ones.
    """
    # Response token j directly follows the position that predicts it.
    following = (columns["positions"] + 1).clamp(max=columns["tokens"].size(1) - 1)
    targets = columns["tokens"].gather(1, following)
    return vocab_parallel_log_probs(logits_brW, targets, vocab_size, group, temperature)


def response_values(scores_bt1: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """Return the value of the state before each response token, [b, r] float32."""
    return rearrange(scores_bt1, "b t 1 -> b t").float().gather(1, columns["positions"])


def last_token_scores(scores_bt1: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """Return the score of each sequence, [b] float32: the head's output at its last token."""
    last = columns["positions"][:, 0] + columns["mask"].sum(dim=1)
    scores_bt = rearrange(scores_bt1, "b t 1 -> b t").float()
    return rearrange(scores_bt.gather(1, rearrange(last, "b -> b 1")), "b 1 -> b")


def vocab_parallel_log_probs(
    logits_BTW: Tensor,
    targets_BT: Tensor,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of each target, entropy) under softmax(logits / temperature), both [B, T] float32.

    Columns at or beyond `vocab_size` are padding and have probability zero. Differentiable in the logits.
    """
    return _LogProbs.apply(logits_BTW, targets_BT, vocab_size, group, temperature)  # type: ignore[no-any-return]


def vocab_parallel_top(
    logits_BTW: Tensor, num_top: int, vocab_size: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return (ids, log-probabilities) of the most likely tokens of each position, both [B, T, num_top], likeliest first.

    Not differentiable. `num_top` is at most `vocab_size`.
    """
    width = logits_BTW.size(-1)
    own = torch.arange(width, device=logits_BTW.device) + group.rank() * width
    logits_BTW = logits_BTW.detach().float().masked_fill(own >= vocab_size, float("-inf"))
    found = logits_BTW.topk(min(num_top, width))
    parts = [logits_BTW.logsumexp(-1, keepdim=True), found.values, own[found.indices].to(found.values.dtype)]
    part = torch.cat(parts, -1).contiguous()  # ids below 2^24 are exact in float32
    gathered = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(gathered, part, group=group)
    totals, values, ids = zip(
        *(one.split([1, *[(one.size(-1) - 1) // 2] * 2], -1) for one in gathered), strict=True
    )
    top = torch.cat(values, -1).topk(num_top)
    log_probs = top.values - torch.cat(totals, -1).logsumexp(-1, keepdim=True)
    return torch.cat(ids, -1).gather(-1, top.indices).long(), log_probs


class _LogProbs(torch.autograd.Function):
    """Processes tokens in blocks that fit the CPU caches, which avoids temporaries of [N, W]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits_BTW: Tensor,
        targets_BT: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        logits_NW, width = logits_BTW.flatten(0, -2), logits_BTW.size(-1)
        first = group.rank() * width
        valid = max(0, min(width, vocab_size - first))
        largest = torch.full((len(logits_NW),), float("-inf"), device=logits_NW.device)
        if valid:
            largest = logits_NW[:, :valid].amax(dim=-1).float() / temperature
        if group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        local = targets_BT.flatten() - first
        here = (local >= 0) & (local < valid)
        column = local.clamp(0, width - 1).unsqueeze(-1)
        sums = torch.zeros(3, len(logits_NW), device=logits_NW.device)
        for rows in _blocks(logits_NW):
            scaled = _scaled(logits_NW[rows, :valid], temperature, largest[rows])
            if valid:
                sums[2, rows] = scaled.gather(-1, column[rows].clamp(max=valid - 1)).squeeze(-1)
            exponentials = scaled.exp()
            sums[0, rows] = exponentials.sum(dim=-1)
            sums[1, rows] = exponentials.mul_(scaled).sum(dim=-1)
        sums[2].masked_fill_(~here, 0.0)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        total, weighted, target = sums
        log_total = total.log()
        mean = weighted / total
        ctx.save_for_backward(logits_BTW, largest, log_total, mean, column, here)
        ctx.temperature, ctx.valid = temperature, valid
        shape = targets_BT.shape
        return (target - log_total).view(shape), (log_total - mean).view(shape)

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits_BTW, largest, log_total, mean, column, here = ctx.saved_tensors
        logits_NW, valid = logits_BTW.flatten(0, -2), ctx.valid
        grad_NW = torch.empty_like(logits_NW)
        grad_NW[:, valid:] = 0.0
        by_log_prob = grad_log_probs.flatten().unsqueeze(-1) / ctx.temperature
        by_entropy = grad_entropy.flatten().unsqueeze(-1) / ctx.temperature
        has_entropy = bool(by_entropy.any())
        for rows in _blocks(logits_NW):
            # d log p(y) / dz = onehot(y) - p;  dH / dz = -p (z - E[z])
            scaled = _scaled(logits_NW[rows, :valid], ctx.temperature, largest[rows])
            probs = (scaled - log_total[rows].unsqueeze(-1)).exp_()
            if has_entropy:
                factor = scaled.sub_(mean[rows].unsqueeze(-1)).mul_(by_entropy[rows]).add_(by_log_prob[rows])
            else:
                factor = by_log_prob[rows]
            grad = probs.mul_(factor).neg_()
            if valid:
                grad.scatter_add_(
                    -1, column[rows].clamp(max=valid - 1), by_log_prob[rows] * here[rows].unsqueeze(-1)
                )
            grad_NW[rows, :valid] = grad.to(grad_NW.dtype)
        return grad_NW.view_as(logits_BTW), None, None, None, None


def _scaled(logits: Tensor, temperature: float, largest: Tensor) -> Tensor:
    """Return a new float32 tensor of the logits over the temperature, minus their maximum."""
    return logits.to(torch.float32, copy=True).div_(temperature).sub_(largest.unsqueeze(-1))


def _blocks(logits_NW: Tensor) -> Iterator[slice]:
    """Yield the rows of each block."""
    size = len(logits_NW) if logits_NW.is_cuda else max(1, BLOCK_ENTRIES // logits_NW.size(-1))
    return (slice(begin, begin + size) for begin in range(0, len(logits_NW), max(1, size)))
