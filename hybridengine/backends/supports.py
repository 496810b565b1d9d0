"""Masks of the tokens that could be drawn, for the logits of a block of tokens and a shard of the vocabulary.

Shapes: B (b) rows, T (t) positions, N outputs of this rank, n of a block, M words of all supports, W tokens of a shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridengine.backends.places import Places
from hybridengine.rows.supports import SUPPORT_SIZES, SUPPORT_WORDS, num_mask_words


@dataclass(frozen=True)
class Supports:
    """Tokens that could be drawn at some positions, in the words of `rows/supports.py`."""

    words_M: Tensor
    """int32."""
    begins: Tensor
    """First word of each position, int64 [B, T] or [N]."""
    sizes: Tensor
    """Number of words of each position, int64 of the same shape."""

    @classmethod
    def of_columns(cls, columns: dict[str, Tensor]) -> Supports | None:
        """Return the supports of a micro-batch's response tokens, [b, r]; None if it has none."""
        if SUPPORT_SIZES not in columns:
            return None
        sizes = columns[SUPPORT_SIZES]
        ends = sizes.flatten().cumsum(0).view_as(sizes)
        return cls(columns[SUPPORT_WORDS], ends - sizes, sizes)

    def at(self, places: Places) -> Supports:
        """Return the supports of this rank's outputs, [N]."""
        return replace(self, begins=places.of(self.begins), sizes=places.of(self.sizes))

    def outside(self, rows: slice, first: int, width: int, vocab_size: int) -> Tensor | None:
        """Return a mask, bool [n, W], of tokens that could not be drawn among `width` ones from `first` on.

        None if all could be.
        """
        begins, sizes = self.begins[rows], self.sizes[rows]
        if not sizes.any():
            return None
        num_words = num_mask_words(vocab_size)
        inside = (sizes == 0).unsqueeze(1).expand(-1, width).contiguous()
        listed = (sizes > 0) & (sizes < num_words)
        counts = sizes * listed
        row = torch.repeat_interleave(counts)
        place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        ids = self.words_M[begins[row] + place].long() - first
        here = (ids >= 0) & (ids < width)
        inside[row[here], ids[here]] = True
        masked = (sizes == num_words).nonzero().flatten()
        if len(masked):
            inside[masked] = self._bits(begins[masked], first, width)
        return inside.logical_not_()

    def _bits(self, begins: Tensor, first: int, width: int) -> Tensor:
        """Return the bits of `width` tokens from `first` on, of masks that begin at these words."""
        begin, end = first // 32, -(-(first + width) // 32)
        words = self.words_M[begins.unsqueeze(1) + torch.arange(begin, end, device=begins.device)]
        in_bytes = words.view(torch.uint8).unsqueeze(
            -1
        )  # little-endian, as all machines with CUDA or AVX are
        bits = (in_bytes >> torch.arange(8, dtype=torch.uint8, device=begins.device)) & 1
        return bits.flatten(1)[:, first - begin * 32 :][:, :width].bool()
