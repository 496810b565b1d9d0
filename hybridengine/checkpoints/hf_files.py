"""Hugging Face checkpoints, read box by box, and written tensor by tensor in any order with one tensor in memory.

A safetensors file is 8 bytes (little-endian length n), n bytes of JSON (name -> dtype, shape, data_offsets) and the data.
The shapes determine the offset of each tensor; the safetensors library can only write whole dictionaries.
Source: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor

from hybridengine.checkpoints.digests import settle
from hybridengine.errors import CheckpointError
from hybridengine.families.family import is_float32
from hybridengine.files import read_object
from hybridengine.models.checkpoint_files import (
    COMPANIONS,
    CONFIG_FILE,
    INDEX_FILE,
    check_checkpoint,
    tensors_of,
)
from hybridengine.models.shapes import EMBEDDING, LM_HEAD, SCORE_HEAD, ModelShape
from hybridengine.reshard.boxes import Box, full_box
from hybridengine.reshard.layout import LocalParameter

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of types in safetensors files."""
SAMPLE_BYTES = 2**18
"""Size of a sample of a file's fingerprint."""
COMPARED_ROWS = 4096
"""Number of rows of two tensors compared at a time."""


def type_of(tensor: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a logical tensor of a model of type `dtype`."""
    return torch.float32 if is_float32(tensor) else dtype


class SafetensorsFolder:
    """Tensors of a Hugging Face checkpoint, read from disk box by box on request."""

    def __init__(self, folder: str | Path) -> None:
        self._files = {name: tensor.file for name, tensor in tensors_of(folder).items()}

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._files

    def fingerprint(self) -> str:
        """Return a digest of samples of the files, from their beginning, middle and end: it is that of the weights,
        wherever the folder is."""
        digest = hashlib.sha256()
        for file in sorted(set(self._files.values())):
            size = file.stat().st_size
            with file.open("rb") as opened:
                for start in (0, max(0, (size - SAMPLE_BYTES) // 2), max(0, size - SAMPLE_BYTES)):
                    opened.seek(start)
                    digest.update(opened.read(SAMPLE_BYTES))
        return digest.hexdigest()

    def read(self, tensor: str, box: Box) -> Tensor:
        """Return one box of a tensor, possibly mapped from the file; CheckpointError if a value is NaN or infinite."""
        file = self._files[tensor]
        # Opened anew: pages of a file that were read count as memory of this process while it is mapped.
        with safe_open(file, framework="pt") as opened:
            found = opened.get_slice(tensor)[tuple(slice(a, b) for a, b in box)]
        # The extremes propagate NaN, and need no second tensor of this size.
        if found.numel() and not all(torch.isfinite(extreme) for extreme in torch.aminmax(found)):
            raise CheckpointError(
                f"{file}: {tensor} has values that are NaN or infinite; weights must be finite: copy the file again from"
                " where it came, or use another checkpoint"
            )
        return found


def read_parameters(
    folder: str | Path,
    parameters: Iterable[LocalParameter],
    weights: Mapping[str, Tensor],
    may_lack: Container[str] = (),
) -> None:
    """Fill parameters of a rank from a checkpoint folder, of which only their boxes are read.

    Tensors in `may_lack` stay zero if there are none. Raises CheckpointError if the checkpoint lacks another, is damaged,
    or has non-finite weights.
    """
    files = SafetensorsFolder(folder)
    for parameter in parameters:
        target = weights[parameter.name]
        target.zero_()
        for piece in parameter.pieces:
            if piece.tensor in files:
                target[piece.index].copy_(files.read(piece.tensor, piece.box))
            elif piece.tensor not in may_lack:
                raise CheckpointError(
                    f"{folder} has no tensor {piece.tensor}, which {parameter.name} needs; use a complete checkpoint"
                )


def check_weights(folder: Path) -> ModelShape:
    """Return the shape of a checkpoint as `check_checkpoint` does; a stored tied head must equal the embedding.

    transformers 5 loads such a head as stored, whatever config.json says. Raises CheckpointError if the head differs, a
    file is missing or damaged, or config.json describes other tensors.
    """
    shape, files = check_checkpoint(folder), SafetensorsFolder(folder)
    for first in (
        range(0, shape.vocab_size, COMPARED_ROWS) if shape.tied_embeddings and LM_HEAD in files else ()
    ):
        rows = (first, min(first + COMPARED_ROWS, shape.vocab_size)), (0, shape.hidden_size)
        if not torch.equal(files.read(LM_HEAD, rows), files.read(EMBEDDING, rows)):
            raise CheckpointError(
                f"{folder}: {LM_HEAD} is stored and differs from {EMBEDDING}, where config.json has"
                " tie_word_embeddings=true; set it to false, or restore the original pair"
            )
    return shape


def frozen_tensors(shape: ModelShape, folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the vision tower of a checkpoint, one by one; nothing for a model that reads no images."""
    files = SafetensorsFolder(folder) if shape.vision_tensors else None
    for name, size in shape.vision_tensors.items():
        assert files is not None, "there are tensors"
        yield name, files.read(name, full_box(size)).clone()


class HfWriter:
    """Writes a checkpoint as files of bounded size with an index.

    A context manager: the folder gets its final name at the end, replacing an older one; if the block raises, it is
    discarded.

    Args:
        shapes: shapes of all tensors, in file order.
        dtype: type of the tensors in the files (`type_of`).
        max_file_bytes: size limit of a file; a larger tensor has its own file.
        companions: folder whose configuration, tokenizer and model card are copied.
        stem: beginning of the files' names.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        max_file_bytes: int,
        companions: Path | None = None,
        stem: str = "model",
    ) -> None:
        self._folder, self._partial = folder, folder.with_name(f".{folder.name}.partial")
        self._shapes, self._dtype, self._companions = dict(shapes), dtype, companions
        self._dtypes = {name: type_of(name, dtype) for name in shapes}
        empty = {
            name: torch.empty(shape, dtype=self._dtypes[name], device="meta")
            for name, shape in shapes.items()
        }
        self._files = split_torch_state_dict_into_shards(
            empty, filename_pattern=stem + "{suffix}.safetensors", max_shard_size=max_file_bytes
        )
        self._places = dict[str, tuple[Path, int]]()
        self.total_bytes = sum(one.nbytes for one in empty.values())
        self.written_bytes = 0

    def __enter__(self) -> HfWriter:
        shutil.rmtree(self._partial, ignore_errors=True)  # left by an attempt that was killed
        self._partial.mkdir(parents=True)
        with gone_on_failure(self._partial):
            self._write_headers()
        return self

    def _write_headers(self) -> None:
        for file, names in self._files.filename_to_tensors.items():
            entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            ends = [0, *accumulate(_num_bytes(self._shapes[name], self._dtypes[name]) for name in names)]
            for name, span in zip(names, pairwise(ends), strict=True):
                shape = list(self._shapes[name])
                entries[name] = {
                    "dtype": NAMES[self._dtypes[name]],
                    "shape": shape,
                    "data_offsets": list(span),
                }
            text = json.dumps(entries, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # align tensors to 8 bytes, so that they can be memory-mapped
            header = struct.pack("<Q", len(text)) + text
            (self._partial / file).write_bytes(header)
            self._places |= {
                name: (self._partial / file, len(header) + begin)
                for name, begin in zip(names, ends, strict=False)
            }
        if self._files.is_sharded:
            index = {"metadata": self._files.metadata, "weight_map": self._files.tensor_to_filename}
            (self._partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to its place; once per tensor."""
        assert tuple(tensor.shape) == self._shapes[name], f"{name} has another shape than was said"
        path, begin = self._places.pop(name)
        flat = tensor.detach().to("cpu", self._dtypes[name]).contiguous().view(-1)
        with path.open("r+b") as file:
            file.seek(begin)
            file.write(flat.view(torch.uint8).numpy().data)
        self.written_bytes += flat.nbytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if error is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            return
        with gone_on_failure(self._partial):
            self._finish()

    def _finish(self) -> None:
        assert not self._places, f"{', '.join(self._places)} were not written"
        for name in COMPANIONS:
            if self._companions is not None and (self._companions / name).is_file():
                shutil.copyfile(self._companions / name, self._partial / name)
        if (config := self._partial / CONFIG_FILE).is_file():
            _fit(config, self._dtype, self._shapes.get(SCORE_HEAD))
        settle(self._partial, [one.name for one in self._partial.iterdir()])
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._partial.rename(self._folder)
        settle(self._folder.parent)


@contextmanager
def gone_on_failure(folder: Path) -> Iterator[None]:
    """Delete a folder that is being written if the block raises."""
    try:
        yield
    except BaseException:  # Ctrl-C included; re-raised
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _fit(file: Path, dtype: torch.dtype, score: tuple[int, ...] | None) -> None:
    """Adapt a configuration to the weights next to it; `score` is the shape of a score head, if there is one."""
    config = read_object(file)
    fitted = dict(config)
    for key in {"dtype", "torch_dtype"} & config.keys():
        fitted[key] = str(dtype).removeprefix("torch.")
    language, scores = "ForCausalLM", "ForSequenceClassification"
    before, after = (language, scores) if score else (scores, language)
    names = config.get("architectures") or []
    fitted["architectures"] = [
        name.removesuffix(before) + after if name.endswith(before) else name for name in names
    ]
    if fitted["architectures"] != names:
        for key in ("num_labels", "id2label", "label2id"):
            fitted.pop(key, None)
        if score:
            fitted["id2label"] = {str(label): f"LABEL_{label}" for label in range(score[0])}
            fitted["label2id"] = {f"LABEL_{label}": label for label in range(score[0])}
    if fitted != config:
        file.write_text(json.dumps(fitted, indent=2) + "\n")


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
