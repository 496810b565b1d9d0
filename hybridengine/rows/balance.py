"""Assignment of rows to micro-batches of about equal work by their token counts, for runs and for plans."""

from __future__ import annotations

from collections.abc import Sequence

from hybridengine.errors import ConfigError


def balance_rows(token_counts: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the ascending row indices of micro-batches: as few as fit `max_tokens` of padded work, balanced by tokens.

    Rows of similar length are grouped, because a micro-batch is padded to its longest row. Raises ConfigError if one
    row alone exceeds `max_tokens`.

    Guarantees: among all cuts of the length-sorted rows into this number of runs, the largest run has the fewest tokens.
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
    fewest = len(_cut_runs(by_length, token_counts, max_tokens, sum(token_counts)))
    low, high = longest, sum(token_counts)
    while low < high:
        middle = (low + high) // 2
        if len(_cut_runs(by_length, token_counts, max_tokens, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return [sorted(rows) for rows in _cut_runs(by_length, token_counts, max_tokens, high)]


def _cut_runs(
    by_length: Sequence[int], token_counts: Sequence[int], max_padded: int, max_sum: int
) -> list[list[int]]:
    """Return consecutive runs of `by_length`, each as long as its padded work and token count allow."""
    runs: list[list[int]] = []
    tokens = 0
    for row in by_length:
        if runs:
            padded = (len(runs[-1]) + 1) * token_counts[runs[-1][0]]
            if padded <= max_padded and tokens + token_counts[row] <= max_sum:
                runs[-1].append(row)
                tokens += token_counts[row]
                continue
        runs.append([row])
        tokens = token_counts[row]
    return runs
