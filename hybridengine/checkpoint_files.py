"""Files of a Hugging Face checkpoint, checked from their headers: of weights only a tied head is read.

A safetensors file is 8 bytes (little-endian length n), n bytes of JSON (name -> dtype, shape, data_offsets) and the
data. That is enough to tell a truncated file, and a `config.json` that describes other tensors.
Source: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

import math
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.errors import CheckpointError, ConfigError, UnreadableError, raise_all, shown
from hybridengine.model_shapes import EMBEDDING, LM_HEAD, ModelShape
from hybridengine.reading import check_regular, parse_json, read_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

MODEL_COMPANIONS = (
    CONFIG_FILE,
    "generation_config.json",
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
)
"""Files beside the weights that say what they are; README.md is the model card."""
TOKENIZER_COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
COMPANIONS = (*MODEL_COMPANIONS, *TOKENIZER_COMPANIONS)
"""Files beside the weights that make a checkpoint folder complete."""
COMPANIONS_FOLDER = "companions"
"""Folder, in a run's, of such files for all models that it writes."""

WEIGHT_DTYPES = {"F32": 4, "BF16": 2, "F16": 2}
"""Weight types that can be loaded -> bytes of an element."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

COMPARED_BYTES = 2**24
"""Bytes of two tensors that are compared at a time."""

MAX_LISTED = 4
"""Tensors named in one message."""


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a safetensors header."""

    name: str
    dtype: str
    """As safetensors writes it: F32, BF16, ..."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int
    file: Path


def check_checkpoint(folder: str | Path) -> ModelShape:
    """Shape of the checkpoint in `folder`, whose files are complete and agree with its `config.json`.

    Raises:
        CheckpointError: everything that is wrong with it, in one list.
    """
    raise_all(checkpoint_problems(folder), CheckpointError)
    return ModelShape.from_folder(folder)


def checkpoint_problems(folder: str | Path) -> list[str]:
    """Return the problems of the checkpoint in `folder`, as value, rule and remedy."""
    folder = Path(folder)
    problems: list[str] = []
    shape = None
    try:
        shape = ModelShape.from_folder(folder)
    except (CheckpointError, ConfigError) as error:
        text = str(error)
        problems.append(text if str(folder) in text else f"{folder / 'config.json'}: {text}")
    files, file_problems = _weight_files(folder)
    tensors, header_problems = _stored(files)
    file_problems += header_problems
    problems += file_problems
    if shape is not None and not file_problems:
        problems += _disagreements(folder, shape, tensors)
    return problems


def tensors_of(folder: str | Path) -> dict[str, StoredTensor]:
    """Return every tensor of a complete checkpoint folder by name: where all that read weights find them.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    files, problems = _weight_files(Path(folder))
    tensors, header_problems = _stored(files)
    raise_all(problems + header_problems, CheckpointError)
    return tensors


def read_header(file: str | Path) -> list[StoredTensor]:
    """Entries of a safetensors file, in the order of their bytes.

    Raises:
        CheckpointError: the file is missing, truncated, or no safetensors file.
    """
    file = Path(file)
    remedy = "copy the file again from where it came"
    try:
        check_regular(file)
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if size_bytes < 8 + header_bytes and header_bytes <= MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{file} is truncated: its header takes {8 + header_bytes} bytes, the file has {size_bytes};"
                    f" {remedy}"
                )
            text = stream.read(header_bytes) if 0 < header_bytes <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); restore it") from None
    except UnreadableError as error:
        raise CheckpointError(f"{error}; restore it") from None
    try:
        entries = parse_json(text)
        if not all(isinstance(note, str) for note in entries.pop("__metadata__", {}).values()):
            raise ValueError("__metadata__")
        tensors = [_entry(file, name, entry) for name, entry in entries.items()]
    except (UnreadableError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{file} has no readable safetensors header ({size_bytes} bytes); {remedy}"
        ) from None
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    expected_bytes = 8 + header_bytes + max((tensor.end for tensor in tensors), default=0)
    if size_bytes != expected_bytes:
        fault = "is truncated" if size_bytes < expected_bytes else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{file} {fault}: its header describes {expected_bytes} bytes, the file has {size_bytes}; {remedy}"
        )
    filled = 0
    for tensor in tensors:
        if tensor.begin != filled:
            raise CheckpointError(
                f"{file}: {tensor.name} begins at byte {tensor.begin}, what is stored before it ends at {filled};"
                f" tensors must neither overlap nor leave gaps: {remedy}"
            )
        filled = tensor.end
    return tensors


def _entry(file: Path, name: str, entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(name)
    if begin > end or not isinstance(dtype, str):
        raise ValueError(name)
    return StoredTensor(name, dtype, shape, begin, end, file)


def _stored(files: list[Path]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Tensors of all files by name, and what is wrong with the files."""
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for file in files:
        try:
            found = {tensor.name: tensor for tensor in read_header(file)}
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if twice := found.keys() & tensors.keys():
            name = min(twice)
            problems.append(
                f"{name} is stored in {tensors[name].file.name} and in {file}; restore the original files"
            )
        tensors |= found
    return tensors, problems


def _weight_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Safetensors files of a checkpoint, and what is wrong with their list.

    As transformers does: where the single file is there, an index beside it does not count.
    """
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE], []
    if not index.exists():
        return [], [
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; save the model as safetensors there"
        ]
    try:
        names = sorted(set(read_object(index)["weight_map"].values()))
        if outside := [
            name for name in names if Path(name).name != name or name in ("", "..") or len(name) > 255
        ]:
            return [], [
                f"{index} names {shown(outside[0])}, which is no file of its folder; restore the original file"
            ]
        files = [folder / name for name in names]
    except UnreadableError as error:
        return [], [f"{error}; restore the original file"]
    except (KeyError, TypeError, AttributeError) as error:
        return [], [f"{index} is no index of shards ({error}); restore the original file"]
    if not files:
        return [], [f"{index} names no shard; restore the original file"]
    missing = [file for file in files if not file.is_file()]
    problems = [f"{file}, named by {INDEX_FILE}, does not exist; restore it" for file in missing]
    return [file for file in files if file not in missing], problems


def _disagreements(folder: Path, shape: ModelShape, tensors: dict[str, StoredTensor]) -> list[str]:
    """Return the differences of the stored tensors from those that `config.json` describes."""
    expected = dict(shape.tensors)
    if LM_HEAD in tensors and shape.tied_embeddings:
        expected[LM_HEAD] = expected[EMBEDDING]  # some exporters store a tied head as well
    config, remedy = (
        folder / "config.json",
        "config.json and weights must be of one model: restore the original pair",
    )
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected and not name.endswith(".inv_freq")]
    both = [tensors[name] for name in expected if name in tensors]
    problems = []
    if missing:
        problems.append(f"{folder}: {_listed(missing)} described by {config} but not stored; {remedy}")
    if unexpected:
        problems.append(f"{folder}: {_listed(unexpected)} stored but not described by {config}; {remedy}")
    other = [
        f"{t.name} is [{_joined([str(size) for size in t.shape])}], not {list(expected[t.name])}"
        for t in both
        if t.shape != expected[t.name]
    ]
    if other:
        problems.append(f"{folder}: shapes differ from {config}: {_joined(other, '; ')}; {remedy}")
    untyped = [f"{t.name} ({t.dtype})" for t in both if t.dtype not in WEIGHT_DTYPES]
    if untyped:
        problems.append(
            f"{folder}: {_joined(untyped)} stored in a type that cannot be trained;"
            " convert the checkpoint to float32 or bfloat16"
        )
    wrong = [t for t in both if t.dtype in WEIGHT_DTYPES and t.end - t.begin != _size_bytes(t)]
    if wrong:
        problems.append(
            f"{folder}: {_listed([t.name for t in wrong])} stored with another number of bytes than shape and type"
            " take; copy the file again from where it came"
        )
    stored_twice = shape.tied_embeddings and LM_HEAD in tensors
    if not problems and stored_twice and not _same_bytes(tensors[LM_HEAD], tensors[EMBEDDING]):
        problems.append(
            f"{folder}: {LM_HEAD} is stored and differs from {EMBEDDING}, where {config} has"
            " tie_word_embeddings=true; set it to false, or restore the original pair"
        )
    return problems


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        for stream, tensor in ((first, one), (second, other)):
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            stream.seek(8 + header_bytes + tensor.begin)
        left = one.end - one.begin
        while left > 0:
            size = min(left, COMPARED_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def _size_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * WEIGHT_DTYPES[tensor.dtype]


def _listed(names: list[str]) -> str:
    """'3 tensors (a, b, c)', followed by a participle in the caller's sentence."""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({_joined(names)})"


def _joined(parts: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(parts) - MAX_LISTED} more" if len(parts) > MAX_LISTED else ""
    return separator.join(parts[:MAX_LISTED]) + more


def copy_companions(model: Path, tokenizer: Path, out: Path) -> None:
    """Copy what belongs to a model's weights into a folder, in place of an older one, and the tokenizer, which may be
    another folder's.

    Raises:
        OSError: a file cannot be read or written.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for folder, names in ((model, MODEL_COMPANIONS), (tokenizer, TOKENIZER_COMPANIONS)):
        for name in names:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, partial / name)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
