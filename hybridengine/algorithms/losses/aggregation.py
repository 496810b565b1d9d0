"""Losses of micro-batches as one gradient: sums first, then one division by a count over the mini-batch.

A mini-batch is what one optimizer step sees: all micro-batches of all data-parallel ranks. Its loss is one of

    token           mean over its valid tokens: a long response weighs more than a short one
    sequence        mean over its sequences of the mean over each one's valid tokens: GRPO as first published
    sequence_sum    mean over its sequences of the sum over each one's valid tokens, divided by a constant: Dr.GRPO

A mean per micro-batch, averaged, would be another number wherever counts differ. So every loss here returns a *sum*
over what it is given, together with sums of statistics; the caller counts tokens or sequences over the whole
mini-batch beforehand (one all-reduce of `Aggregation.count`) and divides by that. The gradient then does not depend on
how rows were cut into micro-batches or spread over ranks. A row is never cut.

A row without a valid token is no sequence: it adds nothing to the sum and is not counted, because padding rows and rows
whose reward failed look like that, and neither may change the loss of the others.

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
from hybridengine.config.sections import LossAggregation


@dataclass(frozen=True)
class Aggregation:
    """The mean of token losses that the loss of a mini-batch is."""

    name: LossAggregation = "token"
    divisor: float = 1.0
    """Constant that sums over a sequence are divided by, e.g. `max_response_tokens`; of sequence_sum only."""

    def loss_sum(self, losses_BR: Tensor, mask_BR: Tensor) -> Tensor:
        """Return the sum of the rows' losses, not yet divided by `count`. Shapes: [B, R] -> [], with gradient."""
        check_shapes(losses_BR=losses_BR, mask_BR=mask_BR)
        if self.name == "sequence":
            return (zero_masked(losses_BR, mask_BR).sum(1) / mask_BR.sum(1).clamp(min=1)).sum()
        total = masked_sum(losses_BR, mask_BR)
        return total / self.divisor if self.name == "sequence_sum" else total

    def count(self, mask_BR: Tensor) -> Tensor:
        """Return the number of valid tokens, or of rows with one: the part of these rows in the mean's divisor."""
        return mask_BR.sum() if self.name == "token" else mask_BR.any(1).sum()

    def stats(self, metric: str, loss_sum: Tensor, mask_BR: Tensor) -> LossStats:
        """Return `loss_sum` as a statistic, with its own count."""
        return LossStats({metric: loss_sum.detach().clone()}, counts={metric: self.count(mask_BR)})


PER_TOKEN = Aggregation("token")


@dataclass(frozen=True)
class LossStats:
    """Statistics of some rows, in a form in which parts can be put together.

    All are 0-dim tensors without gradient that share no memory with a loss (Megatron's schedule divides the
    loss it gets in place).
    """

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Metric -> sum over the valid tokens, or over what `counts` counts."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Metric -> largest value at a valid token; 0 where there is none (only values >= 0 are counted so)."""
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    """Metric -> what its sum is divided by; metrics left out here are means over the valid tokens."""

    def metrics(self, num_tokens: int | Tensor) -> dict[str, float]:
        """Return means of the sums, over `num_tokens` or their own counts, and the maxima; a mean of nothing is 0."""
        means = {
            name: float(total) / max(int(self.counts.get(name, num_tokens)), 1)
            for name, total in self.sums.items()
        }
        return means | {name: float(value) for name, value in self.maxima.items()}

    def over_ranks(self, across: Across) -> LossStats:
        """Return the statistics of all ranks together; collective: every rank has the same metrics in the same order."""
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
    """The loss of a micro-batch, not yet divided by anything. Losses over the same rows add: `a + b`."""

    loss_sum: Tensor
    """0-dim, with gradient; a graph-connected 0 where there is nothing to sum."""
    stats: LossStats

    def __add__(self, other: SummedLoss) -> SummedLoss:
        ours, theirs = self.stats, other.stats
        repeated = {*ours.sums, *ours.maxima} & {*theirs.sums, *theirs.maxima}
        assert not repeated, f"both losses count {sorted(repeated)}: the sums would mix"
        return SummedLoss(self.loss_sum + other.loss_sum, merge_stats([ours, theirs]))


def merge_stats(parts: Iterable[LossStats]) -> LossStats:
    """Return the statistics of all parts (micro-batches, or different losses): sums add, the largest maximum stays."""
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for part in parts:
        for totals, more in ((sums, part.sums), (counts, part.counts)):
            for name, value in more.items():
                totals[name] = totals[name] + value if name in totals else value
        for name, value in part.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    return LossStats(sums, maxima, counts)


def _reduced(values: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """All values in one collective."""
    return list(reduce(torch.stack([value.double() for value in values]))) if values else []
