"""Frozen vision towers: what they make of images, and the positions of images among tokens.

Each process has one tower of a checkpoint, which all of its roles use: engines, and trainers in their first stage.

Shapes: M tokens of images, H hidden size of the decoder, T tokens of a row.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange, repeat
from torch import Tensor

from hybridengine.checkpoints.hf_files import SafetensorsFolder
from hybridengine.data.images import ImageReader
from hybridengine.errors import DataError
from hybridengine.families.sizes import VisionSizes
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.boxes import full_box

NUM_KEPT = 256
"""Images whose embeddings a process keeps: the responses to a prompt read the same ones, several times."""
PREFIX = "visual."


@dataclass(frozen=True)
class ImagePlace:
    """An image among the tokens of a row."""

    begin: int
    """First of its tokens."""
    height: int
    """Height in tokens."""
    width: int

    @property
    def num_tokens(self) -> int:
        return self.height * self.width


def image_places(
    tokens: Sequence[int] | np.ndarray, images: Sequence[np.ndarray], vision: VisionSizes
) -> list[ImagePlace]:
    """Return the places of a row's images, in order; DataError if its tokens have no room for them.

    The first tokens of images are theirs; a model may draw others, which are text.
    """
    found, end = list[ImagePlace](), 0
    row = np.asarray(tokens)
    starts = np.flatnonzero(row == vision.image_token)
    for number, image in enumerate(images):
        height, width = image.shape[0] // vision.side, image.shape[1] // vision.side
        later = starts[starts >= end]
        begin = int(later[0]) if len(later) else len(row)
        end = begin + height * width
        if end > len(row) or (row[begin:end] != vision.image_token).any():
            raise DataError(
                f"image {number} of a row has {height * width} tokens, and the row's tokens have no {height * width} on"
                f" end of id {vision.image_token}; make prompts of hybridengine.data, or repeat the token as often"
            )
        found.append(ImagePlace(begin, height, width))
    return found


def positions(num_tokens: int, places: Sequence[ImagePlace]) -> np.ndarray:
    """Return the frame, row and column of each token, int64 [3, T].

    A token of text is one further than the largest position before it, on all axes; rows and columns of an image count
    from there (Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    parts, end, following = list[np.ndarray](), 0, 0
    for place in places:
        text = place.begin - end
        parts += [
            np.broadcast_to(np.arange(text), (3, text)) + following,
            np.indices((1, place.height, place.width)).reshape(3, -1) + following + text,
        ]
        following += text + max(place.height, place.width)
        end = place.begin + place.num_tokens
    text = num_tokens - end
    parts.append(np.broadcast_to(np.arange(text), (3, text)) + following)
    return np.concatenate(parts, axis=1)


class VisionTower:
    """The vision tower of a checkpoint, in evaluation mode."""

    def __init__(self, folder: Path, shape: ModelShape, dtype: str) -> None:
        from transformers import AutoConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        assert shape.vision is not None, "the model reads images"
        self._vision = shape.vision
        self._device = device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tower_config = config.vision_config
        tower_config._attn_implementation = "sdpa"
        files = SafetensorsFolder(folder)
        weights = {
            name.removeprefix(PREFIX): files.read(name, full_box(size)).clone()
            for name, size in shape.vision_tensors.items()
        }
        tower: Any = Qwen2_5_VisionTransformerPretrainedModel(tower_config)
        tower.load_state_dict(weights)
        self._tower = tower.to(device=device, dtype=getattr(torch, dtype)).eval().requires_grad_(False)
        reader = ImageReader(folder, shape.vision)
        self._mean, self._std = (
            torch.tensor(one, device=device).view(3, 1, 1) for one in (reader.mean, reader.std)
        )
        self._kept = functools.lru_cache(NUM_KEPT)(self._computed)

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return sum(one.nbytes for one in self._tower.parameters())

    def embed(self, image: np.ndarray) -> Tensor:
        """Return the embeddings of an image's tokens, [M, H], row by row; those of recent images are kept."""
        return self._kept(image.tobytes(), image.shape[0], image.shape[1])

    def _computed(self, pixels: bytes, height: int, width: int) -> Tensor:
        vision = self._vision
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(height, width, 3)
        colours = (rearrange(image.to(self._device), "h w c -> c h w").float() / 255 - self._mean) / self._std
        merge, patch = vision.merge_size, vision.patch_size
        patches = rearrange(
            colours, "c (h mh ph) (w mw pw) -> (h w mh mw) c ph pw", mh=merge, mw=merge, ph=patch, pw=patch
        )
        flat = repeat(patches, "n c ph pw -> n (c f ph pw)", f=vision.num_frames)
        grid = torch.tensor([[1, height // patch, width // patch]], device=self._device)
        with torch.no_grad():
            return self._tower(flat.to(self._tower.dtype), grid_thw=grid).pooler_output


@functools.lru_cache(maxsize=4)
def _tower(folder: Path, shape: ModelShape, dtype: str) -> VisionTower:
    return VisionTower(folder, shape, dtype)


def tower_of(folder: str | Path, shape: ModelShape, dtype: str = "float32") -> VisionTower | None:
    """Return this process's tower of a checkpoint; None for a model that reads no images."""
    if shape.vision is None:
        return None
    # Of roles that differ in their heads or adapters alone, the same one.
    return _tower(Path(folder).resolve(), shape.with_adapters(None), dtype)


def identity(image: np.ndarray) -> str:
    """Return a digest of an image, by which an engine knows it again."""
    return hashlib.sha256(f"{image.shape}".encode() + image.tobytes()).hexdigest()
