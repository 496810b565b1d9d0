"""Images as they travel with the rows: the pixels that a vision tower reads, one byte for each colour (decision 0073).

A row's entry is an array of bytes: the number of images and the height and width of each, as little-endian int32, then
the pixels of all images, [height, width, 3] each. Ranks that need the tower's outputs compute them.

Shapes: B rows, M bytes of all images of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from hybridengine.rows.batch import columns_of

IMAGES = "images"
"""Column of rows: an array of bytes for each row (`image_row`)."""
IMAGE_SIZES = "image_sizes"
"""Column of micro-batches: number of bytes of each row's entry, int64 [B]."""
IMAGE_BYTES = "image_bytes"
"""Column of micro-batches: entries of all rows, uint8 [M]."""
NO_IMAGES = np.zeros(4, dtype=np.uint8)
"""Entry of a row without images."""


def image_row(images: Sequence[np.ndarray]) -> np.ndarray:
    """Return the entry of a row with these images, uint8 [height, width, 3] each."""
    header = [len(images), *(side for image in images for side in image.shape[:2])]
    return np.concatenate(
        [np.array(header, dtype="<i4").view(np.uint8), *(image.reshape(-1) for image in images)]
    )


def images_of(entry: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the images of a row's entry, as views of it."""
    begin = 4 + 8 * int(entry[:4].copy().view("<i4")[0])
    sizes = entry[4:begin].copy().view("<i4").reshape(-1, 2).tolist()
    found = []
    for height, width in sizes:
        end = begin + height * width * 3
        found.append(entry[begin:end].reshape(height, width, 3))
        begin = end
    return tuple(found)


def images_of_rows(batch: TensorDictBase) -> list[tuple[np.ndarray, ...]]:
    """Return the images of each row of a batch, which may have no column of them."""
    if IMAGES not in columns_of(batch):
        return [()] * len(batch)
    return [images_of(entry) for entry in batch.get(IMAGES).tolist()]


def image_columns(entries: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return the columns of a micro-batch."""
    sizes = torch.tensor([len(entry) for entry in entries])
    return {IMAGE_SIZES: sizes, IMAGE_BYTES: torch.from_numpy(np.concatenate(entries))}


def images_of_columns(columns: dict[str, Tensor]) -> list[tuple[np.ndarray, ...]]:
    """Return the images of each row of a micro-batch."""
    entries = columns[IMAGE_BYTES].cpu().numpy()
    return [images_of(part) for part in np.split(entries, columns[IMAGE_SIZES].cpu().numpy().cumsum()[:-1])]
