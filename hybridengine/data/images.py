"""Images of data files, as a vision tower reads them, and the tokens that stand for them in prompts.

A row names its images under the key `images`; a prompt has `<image>` in the place of each. Sizes are those of the model's
own processor: both sides are multiples of a token's, within the limits of preprocessor_config.json.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridengine.config import RunConfig
from hybridengine.data.row_files import Message, Row
from hybridengine.errors import CheckpointError, DataError, UnreadableError
from hybridengine.families.sizes import VisionSizes
from hybridengine.files import check_regular, read_object
from hybridengine.models.shapes import ModelShape

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "<image>"
"""Text of a prompt in the place of an image."""
PROCESSOR_FILE = "preprocessor_config.json"
SETTINGS: dict[str, Any] = {
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 1280,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""Settings that transformers takes where the file lacks them."""


class ImageReader:
    """Reads images for the model in `folder`; CheckpointError if its preprocessor_config.json does not fit the model."""

    def __init__(self, folder: str | Path, vision: VisionSizes) -> None:
        self._vision = vision
        file = Path(folder) / PROCESSOR_FILE
        try:
            found: Mapping[str, Any] = read_object(file) if file.exists() else {}
        except UnreadableError as error:
            raise CheckpointError(f"{error}; restore the model's original file") from None
        size = found.get("size") or {}
        edges = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        given = {
            **{key: one for key, one in edges.items() if one},
            **{key: one for key, one in found.items() if one},
        }
        settings = {key: given.get(key, default) for key, default in SETTINGS.items()}
        own = {
            "patch_size": vision.patch_size,
            "merge_size": vision.merge_size,
            "temporal_patch_size": vision.num_frames,
        }
        for key, value in own.items():
            if found.get(key, value) != value:
                raise CheckpointError(
                    f"{file}: {key}={found[key]!r} is not the {value} of config.json; restore the model's original files"
                )
        low, high = settings["min_pixels"], settings["max_pixels"]
        triples = settings["image_mean"], settings["image_std"]
        if not (
            all(isinstance(one, int) for one in (low, high))
            and 0 < low <= high
            and all(isinstance(three, list) and len(three) == 3 for three in triples)
        ):
            raise CheckpointError(
                f"{file}: min_pixels={low!r} and max_pixels={high!r} must be positive integers in this order, and"
                " image_mean and image_std three numbers each; restore the model's original file"
            )
        self._limits = {"min_pixels": low, "max_pixels": high}
        self.mean, self.std = triples
        """Mean and standard deviation of the three colours, by which they are normalised."""

    def size(self, path: Path) -> tuple[int, int]:
        """Return height and width of an image as it is read; DataError if it cannot be."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        width, height = _upright_size(path)
        try:
            return smart_resize(height, width, self._vision.side, **self._limits)
        except ValueError as error:
            raise DataError(f"image {path} of {width} x {height} pixels: {error}; crop it") from None

    def read(self, path: Path) -> np.ndarray:
        """Return the pixels of an image, upright, uint8 [height, width, 3]; DataError if it cannot be read."""
        from PIL.Image import Resampling
        from PIL.ImageOps import exif_transpose

        height, width = self.size(path)
        try:
            image = exif_transpose(_opened(path))
            if image.size != _upright_size(path):  # a PNG may have it behind the pixels
                raise _unreadable(path, ValueError("it gives its orientation at its end"))
            image = image.convert("RGB").resize((width, height), Resampling.BICUBIC)
        except DataError:
            raise
        except (
            Exception
        ) as error:  # a damaged file: OSError, but also SyntaxError and others of its format's reader
            raise _unreadable(path, error) from None
        return np.asarray(image)

    def num_tokens(self, size: tuple[int, int]) -> int:
        """Return the number of tokens of an image of this height and width."""
        return (size[0] // self._vision.side) * (size[1] // self._vision.side)

    def messages(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> list[Message]:
        """Return a row's messages with tokens in the places of images; DataError unless there is a place for each."""
        num_places = sum(message["content"].count(PLACEHOLDER) for message in row.messages)
        if not row.images:
            return row.messages
        if num_places != len(row.images):
            raise DataError(
                f"the prompt has {num_places} times {PLACEHOLDER} for {len(row.images)} images; write it once in the"
                " place of each"
            )
        vision = self._vision
        ids = [vision.begin_token, vision.image_token, vision.end_token]
        mark = "".join(tokenizer.convert_ids_to_tokens(ids))
        return [
            {**message, "content": message["content"].replace(PLACEHOLDER, mark)} for message in row.messages
        ]  # type: ignore[return-value]

    def expanded(self, row: Row, tokens: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Return a prompt's tokens with as many in the place of each image as it has; DataError for other tokens."""
        left = list(sizes)
        if tokens.count(self._vision.image_token) != len(left):
            raise DataError(
                f"{row.place}: the prompt has {tokens.count(self._vision.image_token)} times the token of images"
                f" {self._vision.image_token} for {len(left)} images; write {PLACEHOLDER} in the place of each, and"
                " correct the tokenizer if it has other ids"
            )
        found = list[int]()
        for token in tokens:
            found += [token] * (self.num_tokens(left.pop(0)) if token == self._vision.image_token else 1)
        return found


def image_reader(run: RunConfig) -> ImageReader | None:
    """Return the reader of a run's images; None if its model reads none."""
    vision = ModelShape.from_folder(run.model_folder).vision
    return None if vision is None else ImageReader(run.model_folder, vision)


def _opened(path: Path) -> Image:
    """Return an image whose pixels are not read yet."""
    from PIL import Image, UnidentifiedImageError

    try:
        check_regular(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return Image.open(path)
    except FileNotFoundError:
        raise DataError(f"image {path} does not exist; correct the path or write the file") from None
    except (OSError, UnreadableError, UnidentifiedImageError, Image.DecompressionBombWarning) as error:
        raise _unreadable(path, error) from None
    except Image.DecompressionBombError as error:
        raise _unreadable(path, error) from None


def _upright_size(path: Path) -> tuple[int, int]:
    """Return width and height of an image in the orientation of its EXIF data, without reading its pixels."""
    from PIL.ExifTags import Base
    from PIL.Image import Image

    image = _opened(path)
    try:
        orientation = Image.getexif(image).get(Base.Orientation)  # a PNG's own method reads the pixels
    except Exception as error:  # damaged data: SyntaxError, struct.error and others
        raise _unreadable(path, error) from None
    is_turned = orientation in (5, 6, 7, 8) and image.format != "TIFF"  # whose size is upright already
    width, height = image.size
    return (height, width) if is_turned else (width, height)


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"image {path} cannot be read ({error}); write it again as a PNG or JPEG file")
