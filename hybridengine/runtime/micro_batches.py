"""Micro-batches of about equal work: rows are dealt out by their token counts."""

from __future__ import annotations

from collections.abc import Sequence

from hybridengine.errors import ConfigError


def balance_rows(token_counts: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row indices of each micro-batch: as few as fit `max_tokens` of padded work, of about equal token counts.

    Rows of similar length are put together, because a micro-batch is padded to its longest row. Every row is in exactly
    one micro-batch; each list is ascending.

    Raises:
        ConfigError: one row alone exceeds `max_tokens`.
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
    count = -(-sum(token_counts) // max_tokens)
    while True:
        batches = _cut(by_length, token_counts, count)
        if all(len(rows) * token_counts[rows[0]] <= max_tokens for rows in batches):
            return [sorted(rows) for rows in batches]
        count += 1


def _cut(by_length: list[int], token_counts: Sequence[int], count: int) -> list[list[int]]:
    """Consecutive runs of `by_length`, each closed at its share of all tokens."""
    total, done = sum(token_counts), 0
    batches: list[list[int]] = [[]]
    for position, row in enumerate(by_length):
        rows_left = len(by_length) - position
        full = batches[-1] and done * count >= total * len(batches)
        must_open = batches[-1] and rows_left <= count - len(batches)
        if (full or must_open) and len(batches) < count:
            batches.append([])
        batches[-1].append(row)
        done += token_counts[row]
    return batches
