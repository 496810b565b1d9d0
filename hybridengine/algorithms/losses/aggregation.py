"""Aggregation of micro-batch losses into one gradient: sums first, then one division by a count over the mini-batch.

A mini-batch is the input of one optimizer step: all micro-batches of all data-parallel ranks. Its loss is one of

    token           mean over its valid tokens: long responses weigh more than short ones
    sequence        mean over its sequences of the mean over each one's valid tokens: GRPO as first published
    sequence_sum    mean over its sequences of the sum over each one's valid tokens, divided by a constant: Dr.GRPO

Every loss returns a *sum*, together with sums of statistics; the caller divides by the count of the whole mini-batch (one
all-reduce of `Aggregation.count`). The gradient then does not depend on how rows, which are never cut, are grouped into
micro-batches or distributed over ranks. A row without a valid token (padding, a failed reward) is excluded from sum and
count.

Source: arXiv 2402.03300, equation 3 (sequence); arXiv 2503.14476, section 3.3 (token); arXiv 2503.20783, section 3
(sequence_sum).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridengine.algorithms.across import Across
from hybridengine.algorithms.masking import check_shapes, masked_sum, zero_masked
from hybridengine.config.role_sections import LossAggregation


@dataclass(frozen=True)
class Aggregation:
    """Method of averaging token losses into the loss of a mini-batch."""

    name: LossAggregation = "token"
    divisor: float = 1.0
    """Constant by which sums over a sequence are divided, such as `max_response_tokens`; sequence_sum only."""

    def loss_sum(self, losses_BR: Tensor, mask_BR: Tensor) -> Tensor:
        """Return the sum of the rows' losses, before division by `count`. Shapes: [B, R] -> [], with gradient."""
        check_shapes(losses_BR=losses_BR, mask_BR=mask_BR)
        if self.name == "sequence":
            return (zero_masked(losses_BR, mask_BR).sum(1) / mask_BR.sum(1).clamp(min=1)).sum()
        total = masked_sum(losses_BR, mask_BR)
        return total / self.divisor if self.name == "sequence_sum" else total

    def count(self, mask_BR: Tensor) -> Tensor:
        """Return the number of valid tokens, or of rows with one: the rows' share of the mean's divisor."""
        return mask_BR.sum() if self.name == "token" else mask_BR.any(1).sum()

    def stats(self, metric: str, loss_sum: Tensor, mask_BR: Tensor) -> LossStats:
        """Return `loss_sum` as a statistic with its own count."""
        return LossStats({metric: loss_sum.detach().clone()}, counts={metric: self.count(mask_BR)})


PER_TOKEN = Aggregation("token")


@dataclass(frozen=True)
class LossStats:
    """Mergeable statistics: 0-dim tensors without gradient, in memory of their own: Megatron divides losses in place."""

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Metric -> sum over the valid tokens, or over the units counted in `counts`."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Metric -> largest value at a valid token; 0 if there is none (metrics here are never negative)."""
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    """Metric -> divisor of its sum; other metrics are means over the valid tokens."""

    def metrics(self, num_tokens: int | Tensor) -> dict[str, float]:
        """Return the maxima, and the means of the sums over `num_tokens` or their own counts; an empty mean is 0."""
        means = {
            name: float(total) / max(int(self.counts.get(name, num_tokens)), 1)
            for name, total in self.sums.items()
        }
        return means | {name: float(value) for name, value in self.maxima.items()}

    def over_ranks(self, across: Across) -> LossStats:
        """Return the merged statistics of all ranks; collective: every rank has the same metrics in the same order."""
        totals = _reduced([*self.sums.values(), *self.counts.values()], across.sum)
        maxima = _reduced(list(self.maxima.values()), across.max)
        num_sums = len(self.sums)
        return LossStats(
            dict(zip(self.sums, totals[:num_sums], strict=True)),
            dict(zip(self.maxima, maxima, strict=True)),
            dict(zip(self.counts, totals[num_sums:], strict=True)),
        )


@dataclass(frozen=True)
class SummedLoss:
    """Loss of a micro-batch before any division. Losses over the same rows can be added: `a + b`."""

    loss_sum: Tensor
    """0-dim, with gradient; a graph-connected 0 if there is nothing to sum."""
    stats: LossStats

    def __add__(self, other: SummedLoss) -> SummedLoss:
        ours, theirs = self.stats, other.stats
        repeated = {*ours.sums, *ours.maxima} & {*theirs.sums, *theirs.maxima}
        assert not repeated, f"both losses count {sorted(repeated)}: the sums would mix"
        return SummedLoss(self.loss_sum + other.loss_sum, merge_stats([ours, theirs]))


def merge_stats(parts: Iterable[LossStats]) -> LossStats:
    """Return the merged statistics of all parts (micro-batches, or different losses)."""
    sums, maxima, counts = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    for part in parts:
        for totals, more in ((sums, part.sums), (counts, part.counts)):
            for name, value in more.items():
                totals[name] = totals[name] + value if name in totals else value
        for name, value in part.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    return LossStats(sums, maxima, counts)


def _reduced(values: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Reduce all values in one collective."""
    return list(reduce(torch.stack([value.double() for value in values]))) if values else []
