"""Writes Hugging Face checkpoints tensor by tensor: no more than one of them is in memory.

A safetensors file is 8 bytes (little-endian length n), n bytes of JSON (name -> dtype, shape, data_offsets) and the data.
It can be written from front to back once the shapes are known; the library writes whole dictionaries only.
Source: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridengine.checkpoint_files import COMPANIONS, INDEX_FILE, SINGLE_FILE

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Types as safetensors writes them."""


def write_folder(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
    max_file_bytes: int,
    progress: Callable[[int, int], None],
    companions: Path | None = None,
) -> None:
    """Write tensors as files of bounded size with an index; the folder appears under its name when it is complete.

    Args:
        read: the tensor of a name; called once for each, in order.
        max_file_bytes: a larger tensor has a file for itself.
        progress: told of bytes that are written, and of all of them.
        companions: folder whose configuration, tokenizer and model card are copied.

    Raises:
        OSError: writing failed; nothing has the folder's name.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        files = list(_files(shapes, dtype, max_file_bytes))
        total = sum(_num_bytes(shape, dtype) for shape in shapes.values())
        done, weight_map = 0, {}
        for number, names in enumerate(files, start=1):
            name = SINGLE_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            with (partial / name).open("wb") as file:
                file.write(_header({one: shapes[one] for one in names}, dtype))
                for one in names:
                    tensor = read(one).to(dtype).contiguous()
                    file.write(tensor.view(-1).view(torch.uint8).numpy().data)
                    done += tensor.numel() * tensor.element_size()
                    progress(done, total)
            weight_map |= dict.fromkeys(names, name)
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        for name in COMPANIONS if companions is not None else ():
            assert companions is not None, "there are some"
            if (companions / name).is_file():
                shutil.copyfile(companions / name, partial / name)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


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
