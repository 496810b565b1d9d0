"""Assignment of rows to micro-batches of about equal work by their token counts, for runs and for plans."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hybridengine.errors import ConfigError


def balance_rows(token_counts: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the ascending row indices of micro-batches of at most `max_tokens` tokens, balanced by tokens.

    Rows are packed one behind another, so that the sum of their tokens counts. Each goes to the micro-batch with the
    fewest tokens, the longest row first, and there are as few micro-batches as that allows.

    Raises ConfigError if one row alone exceeds `max_tokens`.
    """
    if not token_counts:
        return []
    longest = max(token_counts)
    if longest > max_tokens:
        raise ConfigError(
            f"a row of {longest} tokens exceeds micro_batch_tokens={max_tokens}; raise micro_batch_tokens to at"
            f" least {longest}"
        )
    by_length = sorted(range(len(token_counts)), key=lambda row: (-token_counts[row], row))
    low, high = max(1, -(-sum(token_counts) // max_tokens)), len(token_counts)
    while low < high:
        middle = (low + high) // 2
        parts = _spread(by_length, token_counts, middle)
        if max(sum(token_counts[row] for row in part) for part in parts) <= max_tokens:
            high = middle
        else:
            low = middle + 1
    return [sorted(part) for part in _spread(by_length, token_counts, high) if part]


def _spread(by_length: Sequence[int], token_counts: Sequence[int], count: int) -> list[list[int]]:
    """Return `count` parts of the rows, each of which went to the part that had the fewest tokens."""
    loads = [(0, number) for number in range(count)]
    parts: list[list[int]] = [[] for _ in range(count)]
    for row in by_length:
        load, number = loads[0]
        heapq.heapreplace(loads, (load + token_counts[row], number))
        parts[number].append(row)
    return parts
