"""Tensors of a checkpoint by name and box, read without trusting the contents of the files.

In PyTorch's distributed format, `.metadata` is a pickle. Here it may only refer to classes that describe tensors; any
other reference is an error before it is called. The tensors are read as data (`weights_only`).
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from hybridengine.errors import CheckpointError
from hybridengine.reshard.boxes import Box, extents, full_box, intersect, moved, starts

METADATA_FILE = ".metadata"
COMMON_STATE = "common_state/"
"""Name prefix of data that Megatron-core 0.19 keeps for all ranks: a pickle, which is never read."""
ALLOWED_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"Path", "PosixPath"},
    "collections": {"OrderedDict"},
}
"""Module -> names that `.metadata` may refer to."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{METADATA_FILE} names {module}.{name}, which no description of tensors needs; it is not loaded, because it"
            " could run code: use a checkpoint that this project has written"
        )


def read_metadata(folder: Path) -> Metadata:
    """Return the description of the tensors in a folder; CheckpointError if it is unreadable, or has anything else."""
    file = folder / METADATA_FILE
    try:
        found = _Unpickler(io.BytesIO(file.read_bytes())).load()
        described = found.state_dict_metadata
        found.state_dict_metadata = {
            name: one for name, one in described.items() if not name.startswith(COMMON_STATE)
        }
    except CheckpointError:
        raise
    except Exception as error:  # pickles fail in any way
        raise CheckpointError(f"{file} cannot be read ({error}); use a complete checkpoint") from None
    for name, one in found.state_dict_metadata.items():
        if not isinstance(one, TensorStorageMetadata):
            raise CheckpointError(
                f"{folder} has {name}, which is not a tensor and would have to be unpickled; use a checkpoint that this"
                " project has written"
            )
    return found


class TensorFolder:
    """Tensors in a folder of PyTorch's distributed format, read from disk on request; see `read_metadata` for errors."""

    def __init__(self, folder: Path) -> None:
        self.folder, metadata = folder, read_metadata(folder)
        self._described = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
        self._places: dict[MetadataIndex, Any] = metadata.storage_data or {}
        self.shapes = {name: tuple(one.size) for name, one in self._described.items()}
        """Name -> shape of the whole tensor."""
        self.dtypes = {name: one.properties.dtype for name, one in self._described.items()}
        """Name -> type of the tensor."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements of one box of a tensor; CheckpointError if any of it is missing or invalid."""
        if name not in self.shapes:
            raise CheckpointError(f"{self.folder} has no tensor {name}; use a complete checkpoint")
        result = torch.empty(extents(box), dtype=self.dtypes[name])
        filled = 0
        for stored in self._described[name].chunks:
            chunk = moved(full_box(tuple(stored.sizes)), (0,) * len(box), tuple(stored.offsets))
            if (common := intersect(chunk, box)) is None:
                continue
            if (place := self._places.get(MetadataIndex(name, stored.offsets))) is None:
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
        except Exception as error:  # invalid data may fail in any way
            # Without torch's message, which suggests trusting the file.
            raise CheckpointError(
                f"{file} has no tensor at byte {place.offset} ({type(error).__name__}); use a complete checkpoint"
            ) from None
