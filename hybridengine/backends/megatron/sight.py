"""Images in a Megatron-core model: a frozen tower's outputs in the places of their tokens, and positions on three axes.

Shapes: S tokens of a pack, I image tokens of this rank, M tokens of all images of a pack, D rotary dims of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from hybridengine.backends.megatron.shim import device
from hybridengine.backends.vision import VisionTower, image_places, positions
from hybridengine.errors import DataError
from hybridengine.families.sizes import VisionSizes


@dataclass(frozen=True)
class Sight:
    """Positions of a pack's tokens, and its images."""

    axes_3S: Tensor
    """Frame, row and column of all tokens of the pack."""
    images: tuple[np.ndarray, ...]
    """Images of all rows, in order."""
    tokens_I: Tensor
    """Indices among this rank's tokens of those of images."""
    rows_I: Tensor
    """Rows of these tokens among the embeddings of all images, [M, H]."""


def sight_of(
    vision: VisionSizes,
    rows: Sequence[np.ndarray],
    images: Sequence[Sequence[np.ndarray]],
    bounds: Tensor,
    own_S: Tensor,
) -> Sight:
    """Return the sight of a pack with these rows of tokens and their images, whose tokens `own_S` are this rank's.

    Raises DataError for a row without room for its images.
    """
    size = int(bounds[-1])
    axes_3S, rows_S = torch.zeros(3, size, dtype=torch.int64), torch.full((size,), -1)
    num_embedded = 0
    for row, seen, start in zip(rows, images, bounds.tolist(), strict=False):
        places = image_places(row, seen, vision)
        axes_3S[:, start : start + len(row)] = torch.from_numpy(positions(len(row), places))
        for place in places:
            begin, num_embedded = num_embedded, num_embedded + place.num_tokens
            first = start + place.begin
            rows_S[first : first + place.num_tokens] = torch.arange(begin, num_embedded)
    own_rows = rows_S[own_S]
    tokens_I = (own_rows >= 0).nonzero().flatten()
    return Sight(
        axes_3S.to(device()),
        tuple(image for seen in images for image in seen),
        tokens_I.to(device()),
        own_rows[tokens_I].to(device()),
    )


class AxisRotary(nn.Module):
    """Rotary embeddings of tokens with positions on several axes, each of which turns a section of the frequencies."""

    def __init__(self, frequencies: Tensor, sections: Sequence[int]) -> None:
        super().__init__()
        self._frequencies, self._sections = frequencies, list(sections)
        self.axes_3S = torch.zeros(len(self._sections), 0)
        """Positions of all tokens of a pack; set before each forward pass."""

    def get_rotary_seq_len(self, *_: Any) -> int:
        """Return 0: the angles are those of a pack's tokens, not of a range of positions."""
        return 0

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return the angles of the pack's tokens, [S, 1, 1, D]."""
        angles = self.axes_3S.unsqueeze(-1) * self._frequencies
        half = torch.cat([part[axis] for axis, part in enumerate(angles.split(self._sections, -1))], -1)
        return torch.cat([half, half], -1)[:, None, None]


def open_eyes(model: GPTModel, vision: VisionSizes) -> None:
    """Let a model see what `show` sets before each forward pass."""
    rotary: Any = model.rotary_pos_emb
    model.rotary_pos_emb = AxisRotary(rotary.inv_freq, vision.sections)  # type: ignore[assignment]
    if model.pre_process:
        model.embedding.seen = None  # type: ignore[assignment]
        model.embedding.register_forward_hook(_with_images)


def show(model: GPTModel, sight: Sight, tower: VisionTower | None) -> None:
    """Set what a model sees in the next forward pass; DataError for images without a tower."""
    rotary: Any = model.rotary_pos_emb
    rotary.axes_3S = sight.axes_3S
    if not model.pre_process:
        return
    embedding: Any = model.embedding
    embedding.seen = None
    if len(sight.tokens_I):
        if tower is None:
            raise DataError("rows have images, and the model has no vision tower; give it one with `see`")
        embeddings_MH = torch.cat([tower.embed(image) for image in sight.images])
        embedding.seen = sight.tokens_I, embeddings_MH[sight.rows_I]


def _with_images(embedding: Any, inputs: object, output_S1H: Tensor) -> Tensor:
    if embedding.seen is None:
        return output_S1H
    tokens_I, embeddings_IH = embedding.seen
    return output_S1H.index_copy(0, tokens_I, embeddings_IH.unsqueeze(1).to(output_S1H.dtype))
