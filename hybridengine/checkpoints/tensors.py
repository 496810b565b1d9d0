"""The tensors of a checkpoint, by name and box, read without trusting what the files say.

Megatron-core's dist_checkpointing writes PyTorch's distributed format: `.metadata` is a pickle. Here it may only name the
classes that describe tensors; anything else in it is an error before it is called. The tensors themselves are read as
data (`weights_only`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hybridengine.errors import CheckpointError
from hybridengine.reshard.boxes import Box, extents, intersect, moved, starts

METADATA_FILE = ".metadata"
COMMON_STATE = "common_state/"
"""Begins the name of what Megatron-core 0.19 keeps for all ranks: a pickle, which is never read."""
_CHECKPOINT = "torch.distributed.checkpoint"
ALLOWED_CLASSES = {
    (f"{_CHECKPOINT}.metadata", "Metadata"),
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"),
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "TensorProperties"),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.metadata", "StorageMeta"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *(
        (f"{_CHECKPOINT}.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    ),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}
"""What `.metadata` may name, beside the types of tensors."""
DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Unpickler(pickle.Unpickler):
    """Makes nothing but descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED_CLASSES or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{METADATA_FILE} names {module}.{name}, which no description of tensors needs; it is not loaded, because it"
            " could run code: use a checkpoint that this project has written"
        )


def read_metadata(folder: Path) -> Metadata:
    """What a folder of tensors says of itself.

    Raises:
        CheckpointError: it cannot be read, names anything but descriptions of tensors, or has other things in it.
    """
    try:
        content = (folder / METADATA_FILE).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} has no {METADATA_FILE} ({error.strerror}); use a complete checkpoint"
        ) from None
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except CheckpointError:
        raise
    except Exception as error:  # pickles fail in any way
        raise CheckpointError(f"{folder}/{METADATA_FILE} cannot be read ({error})") from None
    if not isinstance(found, Metadata):
        raise CheckpointError(
            f"{folder}/{METADATA_FILE} is a {type(found).__name__}, no description of tensors"
        )
    described = found.state_dict_metadata
    found.state_dict_metadata = {
        name: one for name, one in described.items() if not name.startswith(COMMON_STATE)
    }
    for name, one in found.state_dict_metadata.items():
        if not isinstance(one, TensorStorageMetadata):
            raise CheckpointError(
                f"{folder} has {name}, which is no tensor and would have to be unpickled; use a checkpoint that this"
                " project has written"
            )
    return found


class TensorFolder:
    """Tensors in a folder that dist_checkpointing has written, read from disk when asked for."""

    def __init__(self, folder: Path) -> None:
        """Read what is there.

        Raises:
            CheckpointError: as for `read_metadata`.
        """
        self.folder = folder
        self._metadata = read_metadata(folder)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the whole tensor."""
        return {name: tuple(one.size) for name, one in self._described()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Name -> type."""
        return {name: one.properties.dtype for name, one in self._described()}

    def _described(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        for name, one in self._metadata.state_dict_metadata.items():
            assert isinstance(one, TensorStorageMetadata), "checked when it was read"
            yield name, one

    @cached_property
    def _chunks(self) -> dict[str, list[tuple[Box, Any]]]:
        """Name -> boxes, and where each lies."""
        found: dict[str, list[tuple[Box, Any]]] = {name: [] for name in self.shapes}
        sizes = {
            (name, tuple(chunk.offsets)): tuple(chunk.sizes)
            for name, one in self._described()
            for chunk in one.chunks
        }
        for index, place in (self._metadata.storage_data or {}).items():
            offsets = tuple(index.offset or ())
            size = sizes.get((index.fqn, offsets))
            if size is not None:
                box = tuple((start, start + extent) for start, extent in zip(offsets, size, strict=True))
                found[index.fqn].append((box, place))
        return found

    def read(self, name: str, box: Box) -> Tensor:
        """The elements of one box of a tensor.

        Raises:
            CheckpointError: there is no such tensor, parts of the box are missing, or other things are in its place.
        """
        if name not in self.shapes:
            raise CheckpointError(f"{self.folder} has no tensor {name}; use a complete checkpoint")
        result = torch.empty(extents(box), dtype=self.dtypes[name])
        filled = 0
        for chunk, place in self._chunks[name]:
            common = intersect(chunk, box)
            if common is None:
                continue
            source = moved(common, starts(chunk), (0,) * len(chunk))
            target = moved(common, starts(box), (0,) * len(box))
            part = self._stored(place)[tuple(slice(a, b) for a, b in source)]
            result[tuple(slice(a, b) for a, b in target)].copy_(part)
            filled += part.numel()
        if filled != result.numel():
            raise CheckpointError(
                f"{self.folder} has {filled} of the {result.numel()} elements of {name}; use a complete checkpoint"
            )
        return result

    def _stored(self, place: Any) -> Tensor:
        """One chunk, as it was written."""
        file = self.folder / place.relative_path
        if file.resolve().parent != self.folder.resolve():
            raise CheckpointError(
                f"{METADATA_FILE} names {place.relative_path}, which is not in {self.folder}"
            )
        try:
            with file.open("rb") as opened:
                opened.seek(place.offset)
                content = io.BytesIO(opened.read(place.length))
            return torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # what is no tensor fails in any way
            # Without torch's text, which proposes to trust the file.
            raise CheckpointError(
                f"{file} has no tensor at byte {place.offset} ({type(error).__name__}); use a complete checkpoint"
            ) from None
