"""Rows with images for the tiny vision towers of `tiny_models`, and what transformers makes of their pixels."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.unit.model_configs import IMAGE_TOKENS, VISION

PATCH, MERGE = VISION["patch_size"], 2
SIDE = PATCH * MERGE
"""Height and width of a token, in pixels."""


def image_of(height: int, width: int, seed: int) -> np.ndarray:
    """Return a random image of this height and width in tokens."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height * SIDE, width * SIDE, 3), dtype=np.uint8)


def tokens_of(images: list[np.ndarray], seed: int, response: int = 6) -> list[int]:
    """Return a row: text, each image between its marks, more text, and a response that draws the images' token."""
    rng, tokens = random.Random(seed), list[int]()
    begin, pad, end = (IMAGE_TOKENS[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end"))
    for image in images:
        count = (image.shape[0] // SIDE) * (image.shape[1] // SIDE)
        tokens += [*(rng.randrange(120) for _ in range(rng.randrange(1, 4))), begin, *[pad] * count, end]
    return [*tokens, *(rng.randrange(120) for _ in range(response))]


def seen_rows() -> list[tuple[list[int], list[np.ndarray]]]:
    """Return rows (tokens, images) with one image, none, two of different sizes, a tall one, and a wide one."""
    images = [
        [image_of(3, 4, 1)],
        [],
        [image_of(2, 2, 2), image_of(5, 3, 3)],
        [image_of(6, 1, 4)],
        [image_of(1, 5, 5)],
    ]
    return [(tokens_of(seen, number), seen) for number, seen in enumerate(images)]


def pixel_values(image: np.ndarray) -> Tensor:
    """Return the patches that transformers' processor makes of an image of this size."""
    pixels = image.shape[0] * image.shape[1]
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": pixels, "longest_edge": pixels}
    )
    return processor(images=[image], return_tensors="pt")["pixel_values"]


def grids_of(images: list[np.ndarray]) -> Tensor:
    """Return frames, rows and columns of the patches of each image."""
    return torch.tensor([[1, one.shape[0] // PATCH, one.shape[1] // PATCH] for one in images])
