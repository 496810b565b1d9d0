"""How losses of micro-batches become one gradient: sums first, one division by the mini-batch's token count.

A mini-batch is what one optimizer step sees: all micro-batches of all data-parallel ranks. Its loss is the
mean over its N valid tokens. A mean per micro-batch, averaged, would be another number wherever token counts
differ. So every loss here returns a *sum* over the valid tokens of what it is given, together with sums of
statistics; the caller counts N over the whole mini-batch beforehand (one all-reduce of `mask.sum()`) and
divides by it. The gradient then does not depend on how rows were cut into micro-batches or spread over ranks.

A trainer that averages on its own (Megatron's schedule divides by the number of micro-batches where the loss
function returns (loss, stats), its DistributedDataParallel by the data-parallel size) is told so by
`num_averaged_parts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenStats:
    """Statistics of some valid tokens, in a form in which parts can be put together.

    All are 0-dim tensors without gradient that share no memory with a loss (Megatron's schedule divides the
    loss it gets in place). Across ranks: all-reduce `sums` with SUM and `maxima` with MAX.
    """

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Metric -> sum over the valid tokens."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Metric -> largest value at a valid token; 0 where there is none (only values >= 0 are counted so)."""

    def metrics(self, num_tokens: int | Tensor) -> dict[str, float]:
        """Means of the sums over `num_tokens`, and the maxima, as Python numbers; means of no token are 0."""
        divisor = max(int(num_tokens), 1)
        means = {name: float(total) / divisor for name, total in self.sums.items()}
        return means | {name: float(value) for name, value in self.maxima.items()}


@dataclass(frozen=True)
class TokenLoss:
    """The loss of a micro-batch, not yet divided by anything. Losses over the same tokens add: `a + b`."""

    loss_sum: Tensor
    """Sum over the valid tokens, 0-dim, with gradient; a graph-connected 0 where there is no valid token."""
    stats: TokenStats

    def __add__(self, other: TokenLoss) -> TokenLoss:
        repeated = _names(self.stats) & _names(other.stats)
        assert not repeated, f"both losses count {sorted(repeated)}: the sums would mix"
        return TokenLoss(self.loss_sum + other.loss_sum, merge_stats([self.stats, other.stats]))


def merge_stats(parts: Iterable[TokenStats]) -> TokenStats:
    """Statistics of all parts (micro-batches, or different losses) together: sums add, maxima compete."""
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for part in parts:
        for name, total in part.sums.items():
            sums[name] = sums[name] + total if name in sums else total
        for name, value in part.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    return TokenStats(sums, maxima)


def global_token_mean(
    loss_sum: Tensor, num_global_tokens: int | Tensor, num_averaged_parts: int = 1
) -> Tensor:
    """What to call backward on: this micro-batch's share of the mean over the mini-batch's valid tokens.

    Args:
        loss_sum: `TokenLoss.loss_sum` of the micro-batch.
        num_global_tokens: valid tokens of the whole mini-batch: all micro-batches, all data-parallel ranks.
        num_averaged_parts: over how many parts the trainer averages gradients afterwards: the number of
            micro-batches if its schedule divides by that, times the data-parallel size if gradients are
            averaged and not summed over ranks; 1 if it only sums.
    """
    divisor = torch.as_tensor(num_global_tokens, device=loss_sum.device).clamp(min=1)
    return loss_sum * num_averaged_parts / divisor


def _names(stats: TokenStats) -> set[str]:
    return set(stats.sums) | set(stats.maxima)
