"""Supports: the tokens that could be drawn where a token was drawn, as they travel with the rows (decision 0067).

With top_k, top_p, min_p or a grammar, a sampler draws from a part of the vocabulary. The support of a draw is an array of
int32 words, exact and of at most V / 8 bytes:

    no words                    all tokens
    fewer than ceil(V / 32)     the ids of the tokens
    ceil(V / 32) words          a bit for each token, from the lowest bit of the first word

Shapes: B rows, R response tokens, M words of all supports of a micro-batch, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SUPPORTS = "supports"
"""Column of rows: an int32 array for each row (`support_row`)."""
SUPPORT_SIZES = "support_sizes"
"""Column of micro-batches: number of words of each response token's support, int64 [B, R]."""
SUPPORT_WORDS = "support_words"
"""Column of micro-batches: words of all supports, int32 [M], in the order of rows and tokens."""
WHOLE = np.empty(0, dtype=np.int32)
"""Support of a draw from the whole vocabulary, and of tokens that were not drawn."""


def num_mask_words(vocab_size: int) -> int:
    """Return the number of words with a bit for each token."""
    return -(-vocab_size // 32)


def support_of(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the support with these tokens, int32 [words]."""
    if len(ids) == vocab_size:
        return WHOLE
    size = num_mask_words(vocab_size)
    if len(ids) < size:
        return ids.astype(np.int32)
    bits = np.zeros(size * 32, dtype=bool)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def support_row(supports: Sequence[np.ndarray]) -> np.ndarray:
    """Return the entry of a row: the number of words of each response token's support, then their words."""
    sizes = np.array([len(one) for one in supports], dtype=np.int32)
    return np.concatenate([sizes, *supports])


def support_columns(rows: Sequence[np.ndarray], lengths: Sequence[int], width: int) -> dict[str, Tensor]:
    """Return the columns of a micro-batch of `width` response tokens; `lengths` are those of its rows' responses."""
    sizes_BR = torch.zeros(len(rows), width, dtype=torch.int64)
    for sizes, row, length in zip(sizes_BR, rows, lengths, strict=True):
        sizes[:length] = torch.from_numpy(row[:length].astype(np.int64))
    words = [row[length:] for row, length in zip(rows, lengths, strict=True)]
    return {SUPPORT_SIZES: sizes_BR, SUPPORT_WORDS: torch.from_numpy(np.concatenate([WHOLE, *words]))}
