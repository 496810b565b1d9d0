"""Writes Hugging Face checkpoints tensor by tensor, in any order: no more than one of them is in memory.

A safetensors file is 8 bytes (little-endian length n), n bytes of JSON (name -> dtype, shape, data_offsets) and the data.
Where each tensor lies is known once the shapes are; the library writes whole dictionaries only.
Source: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from hybridengine.checkpoint_files import COMPANIONS, CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from hybridengine.checkpoints.digests import settle, sync
from hybridengine.model_shapes import SCORE_HEAD
from hybridengine.reading import read_object

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Types as safetensors writes them."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes are."""

    file: Path
    begin: int


class HfWriter:
    """A checkpoint that is being written: files of bounded size with an index.

    A context manager. The folder appears under its name at the end, in place of an older one, and not at all where the
    block raises.

    Args:
        shapes: of all tensors, in the order that they have in the files.
        dtype: of the files.
        max_file_bytes: a larger tensor has a file for itself.
        companions: folder whose configuration, tokenizer and model card are copied.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        max_file_bytes: int,
        companions: Path | None = None,
    ) -> None:
        self._folder, self._partial = folder, folder.with_name(f".{folder.name}.partial")
        self._shapes, self._dtype, self._companions = dict(shapes), dtype, companions
        self._files = list(_files(shapes, dtype, max_file_bytes))
        self._places = dict[str, _Place]()
        self.total_bytes = sum(_num_bytes(shape, dtype) for shape in shapes.values())
        self.written_bytes = 0

    def __enter__(self) -> HfWriter:
        """Write what is known without the tensors.

        Raises:
            OSError: the folder cannot be written.
        """
        shutil.rmtree(self._partial, ignore_errors=True)  # of an attempt that was killed
        self._partial.mkdir(parents=True)
        with gone_on_failure(self._partial):
            self._write_headers()
        return self

    def _write_headers(self) -> None:
        weight_map = dict[str, str]()
        for number, names in enumerate(self._files, start=1):
            file = (
                SINGLE_FILE
                if len(self._files) == 1
                else f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
            )
            header = _header({name: self._shapes[name] for name in names}, self._dtype)
            begin = len(header)
            for name in names:
                self._places[name] = _Place(self._partial / file, begin)
                begin += _num_bytes(self._shapes[name], self._dtype)
            (self._partial / file).write_bytes(header)
            weight_map |= dict.fromkeys(names, file)
        if len(self._files) > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self._partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into its place; each once.

        Raises:
            OSError: it cannot be written.
        """
        assert tuple(tensor.shape) == self._shapes[name], f"{name} has another shape than was said"
        place = self._places.pop(name)
        flat = tensor.detach().to("cpu", self._dtype).contiguous().view(-1)
        with place.file.open("r+b") as file:
            file.seek(place.begin)
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
        for name in COMPANIONS if self._companions is not None else ():
            assert self._companions is not None, "there are some"
            if (self._companions / name).is_file():
                shutil.copyfile(self._companions / name, self._partial / name)
        if (config := self._partial / CONFIG_FILE).is_file():
            _fit(config, self._dtype, self._shapes.get(SCORE_HEAD))
        settle(self._partial, [one.name for one in self._partial.iterdir()])
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._partial.rename(self._folder)
        sync(self._folder.parent)


@contextmanager
def gone_on_failure(folder: Path) -> Iterator[None]:
    """A folder that is being written does not stay where that fails."""
    try:
        yield
    except BaseException:  # Ctrl-C included; raised again
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _fit(file: Path, dtype: torch.dtype, score: tuple[int, ...] | None) -> None:
    """Have a configuration describe the weights beside it; it may be that of the model that they came from.

    Args:
        score: shape of the head that gives scores in place of tokens; None where there is none.
    """
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


def _files(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_file_bytes: int) -> list[list[str]]:
    """Names of each file's tensors, in order."""
    files: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = _num_bytes(shape, dtype)
        if files[-1] and held + size > max_file_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + _num_bytes(shape, dtype)
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8, so that they can be mapped into memory
    return struct.pack("<Q", len(text)) + text


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
