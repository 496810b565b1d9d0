"""Which rows an optimizer step takes: drawn anew for each epoch, and the same ones for any number of replicas."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_mini_batches(numbers_B: Tensor, count: int, unit: int, seed: int) -> tuple[Tensor, ...]:
    """Rows of each mini-batch, as places in `numbers_B`.

    Of every `count` units that follow each other among all rows, each mini-batch gets one; which one is drawn. So a
    mini-batch does not depend on how many replicas share the rows, as long as each has a multiple of `count` units. Other
    numbers of units are split so that mini-batches differ by one unit at most, and none is empty.

    Args:
        numbers_B: int64, of this replica's rows among those of all replicas, ascending.
        count: of mini-batches.
        unit: so many rows, one behind the other, stay together.
        seed: the same on all ranks.
    """
    units = numbers_B[::unit] // unit
    blocks, places = units // count, units % count
    generator = torch.Generator().manual_seed(seed)
    # Drawn block by block from the first one on: whoever needs fewer blocks draws the same for those.
    drawn = torch.rand(int(blocks[-1]) + 1, count, generator=generator, dtype=torch.float64).argsort(dim=1)
    order = drawn[blocks, places].argsort(stable=True)
    return tuple((part[:, None] * unit + torch.arange(unit)).flatten() for part in order.tensor_split(count))
