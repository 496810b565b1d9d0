"""Endless shuffled epochs with random access: a resume needs only how many rows have been drawn."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def shuffled_rows(num_rows: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Row numbers of batch `step` (from 0), where all batches have one size: `rows_after` those of earlier ones."""
    return rows_after(num_rows, batch_size, seed, step * batch_size)


def rows_after(num_rows: int, batch_size: int, seed: int, num_drawn: int) -> list[int]:
    """Row numbers of the batch that comes after `num_drawn` rows.

    The rows form one endless stream of epochs, each a permutation of its own; batches are cut from the stream,
    so one may span two epochs.

    Guarantees: every epoch holds each row exactly once, and the result depends on nothing but the arguments.
    """
    assert num_rows > 0 and batch_size > 0 and num_drawn >= 0, f"{num_rows=} {batch_size=} {num_drawn=}"
    rows: list[int] = []
    for position in range(num_drawn, num_drawn + batch_size):
        epoch, offset = divmod(position, num_rows)
        rows.append(int(_order(num_rows, seed, epoch)[offset]))
    return rows


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)
