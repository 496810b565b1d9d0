"""The next token's distribution at some positions, from hidden states and a vocabulary that is sharded over ranks.

The group of the shards is explicit: Megatron-core's vocab-parallel cross entropy uses a global group and does not
support padding. Logits exist for a block of tokens at a time, in the forward and in the backward pass, as in the fused
linear cross entropy of Liger Kernel (arXiv 2410.10989, section 3.2), here with a sharded vocabulary and entropies.

Shapes: B (b) rows, T (t) positions, H hidden size, W = padded vocabulary / t, N = B·T, K tokens of a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.backends.places import Places
from hybridengine.backends.supports import Supports

BLOCK_ENTRIES = 2**25
"""Largest number of logits that exist at a time: 128 MiB in float32."""
OUTSIDE = -1e20
"""Logit of a token that could not be drawn: its probability is zero, and sums with it are finite."""


@dataclass(frozen=True)
class Predictions:
    """Distributions over the vocabulary that follow some positions, differentiable in hidden states and weight.

    The ranks of `group` and those of `places` call the same methods in the same order.
    """

    hidden_NH: Tensor
    """Hidden states; their gradient is this rank's part, which whoever made them sums over the group."""
    weight_WH: Tensor
    """This rank's rows of the output layer's weight."""
    vocab_size: int
    """Size of the vocabulary; later rows of the weight are padding, whose probability is zero."""
    group: dist.ProcessGroup
    """Ranks with the other rows of the weight."""
    places: Places
    """Places of the hidden states among the entries [B, T] of results."""

    def __getitem__(self, index: Any) -> Predictions:
        """Return the predictions of some rows and positions, such as `[:, :-1]`."""
        places, outputs = self.places[index]
        return replace(self, hidden_NH=self.hidden_NH[outputs], places=places)

    def log_probs(
        self, targets_BT: Tensor, temperature: float | Tensor = 1.0, supports: Supports | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (log-probability of each target, entropy) under softmax(logits / temperature), both [B, T] float32.

        A tensor of temperatures is broadcast to the targets. With `supports` [B, T], the softmax is over these tokens
        alone, which include the target. Positions without a prediction, such as those beyond a row's end, have zeros.
        """
        log_probs_BT1, entropies_BT = self._log_probs(targets_BT.unsqueeze(-1), temperature, supports)
        return log_probs_BT1.squeeze(-1), entropies_BT

    def log_probs_of(self, ids_BTK: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the log-probability of each of K tokens at each position, [B, T, K] float32, as `log_probs` does."""
        return self._log_probs(ids_BTK, temperature)[0]

    def _log_probs(
        self, ids_BTK: Tensor, temperature: float | Tensor, supports: Supports | None = None
    ) -> tuple[Tensor, Tensor]:
        temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=ids_BTK.device)
        log_probs_NK, entropies_N = _LogProbs.apply(
            self.hidden_NH,
            self.weight_WH,
            self.places.of(ids_BTK),
            self.places.of(temperatures.expand(ids_BTK.shape[:-1])).unsqueeze(-1),
            self.vocab_size,
            self.group,
            None if supports is None else supports.at(self.places),
        )
        return self.places.spread(log_probs_NK), self.places.spread(entropies_N)

    def most_likely(self, count: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return (ids, log-probabilities) of the most likely tokens, both [B, T, count], the most likely first.

        Not differentiable. `count` is at most the size of the vocabulary; the log-probabilities are of
        softmax(logits / temperature).
        """
        hidden_NH, weight_WH = self.hidden_NH.detach(), self.weight_WH.detach()
        ids, log_probs = (
            hidden_NH.new_empty(len(hidden_NH), count, dtype=dtype) for dtype in (torch.int64, torch.float32)
        )
        for rows, (logits,) in _blocks(hidden_NH, weight_WH, num_buffers=1):
            logits = _logits(hidden_NH[rows], weight_WH, logits).div_(temperature)
            ids[rows], log_probs[rows] = most_likely(logits, count, self.vocab_size, self.group)
        return self.places.spread(ids), self.places.spread(log_probs)

    def squared_probs(self, temperature: float = 1.0, supports: Supports | None = None) -> Tensor:
        """Return the sum over the vocabulary of squared probabilities, [B, T] float32, the chance that two draws agree.

        Not differentiable. The probabilities are those of `log_probs`.
        """
        hidden_NH, weight_WH = self.hidden_NH.detach(), self.weight_WH.detach()
        first = self.group.rank() * len(weight_WH)
        weight_VH = weight_WH[: max(0, min(len(weight_WH), self.vocab_size - first))]
        at = None if supports is None else supports.at(self.places)
        drawable = _Drawable(at, first, len(weight_VH), self.vocab_size)
        sums_2N = hidden_NH.new_full((2, len(hidden_NH)), -torch.inf, dtype=torch.float32)
        for rows, (logits,) in _blocks(hidden_NH, weight_VH, num_buffers=1):
            scaled = _logits(hidden_NH[rows], weight_VH, logits).div_(temperature)
            drawable.mask_(scaled, rows)
            sums_2N[0, rows] = scaled.logsumexp(-1)
            sums_2N[1, rows] = scaled.mul_(2.0).logsumexp(-1)
        gathered = [torch.empty_like(sums_2N) for _ in range(self.group.size())]
        dist.all_gather(gathered, sums_2N, group=self.group)
        total_N, squared_N = torch.stack(gathered).logsumexp(0)
        return self.places.spread((squared_N - 2.0 * total_N).exp())

    def logits(self) -> Tensor:
        """Return this rank's logits of all tokens, [B, T, W] float32, which need as much memory."""
        return self.places.spread(torch.nn.functional.linear(self.hidden_NH, self.weight_WH).float())


def most_likely(
    logits_NW: Tensor, count: int, vocab_size: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return (ids, log-probabilities) of the most likely tokens by sharded logits, both [N, count]."""
    width = logits_NW.size(-1)
    own = torch.arange(width, device=logits_NW.device) + group.rank() * width
    logits_NW = logits_NW.masked_fill(own >= vocab_size, float("-inf"))
    found = logits_NW.topk(min(count, width))
    parts = [logits_NW.logsumexp(-1, keepdim=True), found.values, own[found.indices].to(found.values.dtype)]
    part = torch.cat(parts, -1).contiguous()  # ids below 2^24 are exact in float32
    gathered = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(gathered, part, group=group)
    totals, values, ids = zip(
        *(one.split([1, *[(one.size(-1) - 1) // 2] * 2], -1) for one in gathered), strict=True
    )
    top = torch.cat(values, -1).topk(count)
    log_probs = top.values - torch.cat(totals, -1).logsumexp(-1, keepdim=True)
    return torch.cat(ids, -1).gather(-1, top.indices).long(), log_probs


class _LogProbs(torch.autograd.Function):
    """Each rank sums over its part of the vocabulary, relative to its own largest logit; two small messages join them."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_NH: Tensor,
        weight_WH: Tensor,
        targets_NK: Tensor,
        temperature_N1: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup,
        supports: Supports | None,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, width = len(hidden_NH), len(weight_WH)
        first = group.rank() * width
        weight_VH = weight_WH[: max(0, min(width, vocab_size - first))]
        local_NK = targets_NK - first
        here_NK = (local_NK >= 0) & (local_NK < len(weight_VH))
        column_NK = local_NK.clamp(0, max(0, len(weight_VH) - 1))
        largest_N, (total_N, weighted_N), target_NK = (
            hidden_NH.new_full((num_tokens,), torch.finfo(torch.float32).min, dtype=torch.float32),
            hidden_NH.new_zeros(2, num_tokens, dtype=torch.float32),
            hidden_NH.new_zeros(column_NK.shape, dtype=torch.float32),
        )
        drawable = _Drawable(supports, first, len(weight_VH), vocab_size)
        for rows, (logits, other) in _blocks(hidden_NH, weight_VH, num_buffers=2):
            scaled = _logits(hidden_NH[rows], weight_VH, logits).div_(temperature_N1[rows])
            drawable.mask_(scaled, rows)
            target_NK[rows] = scaled.gather(-1, column_NK[rows])
            largest_N[rows] = scaled.amax(-1)
            scaled -= largest_N[rows].unsqueeze(-1)
            exponentials = torch.exp(scaled, out=other)
            total_N[rows] = exponentials.sum(-1)
            weighted_N[rows] = exponentials.mul_(scaled).sum(-1)
        own_N = largest_N
        if group.size() > 1:
            largest_N = own_N.clone()
            dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=group)
            shift_N = own_N - largest_N
            factor_N = shift_N.exp()
            targets_NK = (target_NK - largest_N.unsqueeze(-1)).masked_fill_(~here_NK, 0.0)
            sums = torch.stack(
                [total_N * factor_N, (weighted_N + shift_N * total_N) * factor_N, *targets_NK.T]
            )
            dist.all_reduce(sums, group=group)
            total_N, weighted_N, target_NK = sums[0], sums[1], sums[2:].T
        else:
            target_NK = target_NK - largest_N.unsqueeze(-1)
        log_total_N, mean_N = total_N.log(), weighted_N / total_N
        ctx.save_for_backward(
            hidden_NH, weight_WH, temperature_N1, largest_N, log_total_N, mean_N, column_NK, here_NK
        )
        ctx.num_valid, ctx.drawable = len(weight_VH), drawable
        ctx.set_materialize_grads(False)
        return target_NK - log_total_N.unsqueeze(-1), log_total_N - mean_N

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_WH, temperature_N1, largest_N, log_total_N, mean_N, column_NK, here_NK = (
            ctx.saved_tensors
        )
        weight_VH = weight_WH[: ctx.num_valid]
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        by_target_NK, by_entropy_N1 = (
            like.new_zeros(like.shape, dtype=torch.float32)
            if grad is None
            else grad.view_as(like) / temperature_N1
            for grad, like in ((grad_log_probs, column_NK), (grad_entropies, temperature_N1))
        )
        by_log_prob_N1 = by_target_NK.sum(-1, keepdim=True)
        grad_hidden_NH = torch.zeros_like(hidden_NH)
        grad_weight_WH = torch.zeros_like(weight_WH, dtype=torch.float32) if for_weight else None
        num_buffers = 1 if grad_entropies is None else 2
        for rows, (logits, *others) in _blocks(hidden_NH, weight_VH, num_buffers):
            # d log p(y) / dz = onehot(y) - p;  dH / dz = -p (z - E[z])
            scaled = _logits(hidden_NH[rows], weight_VH, logits).div_(temperature_N1[rows])
            ctx.drawable.mask_(scaled, rows)
            scaled -= largest_N[rows].unsqueeze(-1)
            log_total = log_total_N[rows].unsqueeze(-1)
            if grad_entropies is None:
                grad = scaled.sub_(log_total).exp_().mul_(by_log_prob_N1[rows])
            else:
                grad = torch.sub(scaled, log_total, out=others[0]).exp_()
                grad *= (
                    scaled.sub_(mean_N[rows].unsqueeze(-1))
                    .mul_(by_entropy_N1[rows])
                    .add_(by_log_prob_N1[rows])
                )
            grad.neg_().scatter_add_(-1, column_NK[rows], by_target_NK[rows] * here_NK[rows])
            grad = grad.to(hidden_NH.dtype)
            if for_hidden:
                grad_hidden_NH[rows] = grad @ weight_VH
            if grad_weight_WH is not None:
                sum_VH = grad_weight_WH[: ctx.num_valid]
                if grad.dtype == sum_VH.dtype:
                    sum_VH.addmm_(grad.T, hidden_NH[rows])
                else:
                    sum_VH += grad.T @ hidden_NH[rows]
        return (
            grad_hidden_NH if for_hidden else None,
            None if grad_weight_WH is None else grad_weight_WH.to(weight_WH.dtype),
            *[None] * 5,
        )


@dataclass(frozen=True)
class _Drawable:
    """Restriction of this rank's logits, of `width` tokens from `first` on, to those that could be drawn."""

    supports: Supports | None
    first: int
    width: int
    vocab_size: int

    def mask_(self, logits_NW: Tensor, rows: slice) -> None:
        """Set the logits of other tokens to `OUTSIDE`."""
        if self.supports is None:
            return
        outside = self.supports.outside(rows, self.first, self.width, self.vocab_size)
        if outside is not None:
            logits_NW.masked_fill_(outside, OUTSIDE)


def _logits(hidden_NH: Tensor, weight_WH: Tensor, out_NW: Tensor) -> Tensor:
    """Write logits to `out_NW`, float32, rounded to the model's own type before, as engines round theirs; return it."""
    if hidden_NH.dtype == out_NW.dtype:
        return torch.mm(hidden_NH, weight_WH.T, out=out_NW)
    return out_NW.copy_(hidden_NH @ weight_WH.T)


def _blocks(
    hidden_NH: Tensor, weight_WH: Tensor, num_buffers: int
) -> Iterator[tuple[slice, Sequence[Tensor]]]:
    """Yield the tokens of each block and float32 buffers of the size of its logits; none if the weight has no rows."""
    num_tokens, width = len(hidden_NH), len(weight_WH)
    size = min(num_tokens, max(1, BLOCK_ENTRIES // max(1, width)))
    buffers = hidden_NH.new_empty(num_buffers, size, width, dtype=torch.float32)
    for begin in range(0, num_tokens if width else 0, max(1, size)):
        rows = slice(begin, min(begin + size, num_tokens))
        yield rows, [buffer[: rows.stop - begin] for buffer in buffers]
