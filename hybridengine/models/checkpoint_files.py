"""Validation of Hugging Face checkpoints from their headers: `config.json` must describe the stored tensors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from hybridengine.errors import CheckpointError, ConfigError, UnreadableError, raise_all, shown
from hybridengine.files import check_regular, read_object
from hybridengine.models.shapes import EMBEDDING, LM_HEAD, ModelShape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
"""Files of a PEFT folder."""

MODEL_COMPANIONS = (
    CONFIG_FILE,
    "generation_config.json",
    "preprocessor_config.json",
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
)
"""Files next to the weights that describe them; README.md is the model card."""
CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""Template beside a tokenizer, which transformers prefers to that of tokenizer_config.json."""
TOKENIZER_COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE_FILE,
    "vocab.json",
    "merges.txt",
)
COMPANIONS = (*MODEL_COMPANIONS, *TOKENIZER_COMPANIONS)
"""Files next to the weights that complete a checkpoint folder."""
COMPANIONS_FOLDER = "companions"
"""Folder within the run's folder that holds the companions of every model the run writes."""

WEIGHT_DTYPES = ("F32", "BF16", "F16")
"""Supported weight types."""

MAX_LISTED = 4
"""Largest number of tensors named in one message."""


class StoredTensor(NamedTuple):
    """One entry of a safetensors header."""

    name: str
    dtype: str
    """Type as safetensors names it: F32, BF16, ..."""
    shape: tuple[int, ...]
    file: Path


def check_checkpoint(folder: str | Path) -> ModelShape:
    """Return the shape of the checkpoint in `folder`; CheckpointError with every problem of its files and config.json."""
    raise_all(checkpoint_problems(folder), CheckpointError)
    return ModelShape.from_folder(folder)


def checkpoint_problems(folder: str | Path) -> list[str]:
    """Return the problems of the checkpoint in `folder`, each as value, rule and remedy."""
    folder = Path(folder)
    problems: list[str] = []
    shape = None
    try:
        shape = ModelShape.from_folder(folder)
    except (CheckpointError, ConfigError) as error:
        text = str(error)
        problems.append(text if str(folder) in text else f"{folder / 'config.json'}: {text}")
    tensors, file_problems = _stored(folder)
    problems += file_problems
    if shape is not None and not file_problems:
        problems += _disagreements(folder, shape, tensors)
    return problems


def adapter_problems(folder: str | Path) -> list[str]:
    """Return the problems of a PEFT folder's files."""
    try:
        read_object(Path(folder) / ADAPTER_CONFIG)
        read_header(Path(folder) / ADAPTER_FILE)
    except (OSError, UnreadableError, CheckpointError) as error:
        return [f"{folder} is not a whole PEFT folder ({error}); copy it again from where it came"]
    return []


def tensors_of(folder: str | Path) -> dict[str, StoredTensor]:
    """Return every tensor of a complete checkpoint folder by name; CheckpointError if a file is missing or damaged."""
    tensors, problems = _stored(Path(folder))
    raise_all(problems, CheckpointError)
    return tensors


def read_header(file: Path) -> list[StoredTensor]:
    """Return the entries of a safetensors file; CheckpointError if it is missing, truncated, or none."""
    try:
        check_regular(file)
        with safe_open(file, framework="numpy") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118
            return [StoredTensor(name, one.get_dtype(), tuple(one.get_shape()), file) for name, one in slices]
    except (OSError, UnreadableError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is not a whole safetensors file ({error}); copy the file again from where it came"
        ) from None


def _stored(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors of a checkpoint by name, and the problems of its files."""
    tensors: dict[str, StoredTensor] = {}
    try:
        files = _weight_files(folder)
    except CheckpointError as error:
        return tensors, [str(error)]
    missing = [file for file in files if not file.is_file()]
    problems = [f"{file}, named by {INDEX_FILE}, does not exist; restore it" for file in missing]
    for file in files:
        if file in missing:
            continue
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


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that a checkpoint names; as in transformers, an index beside a single file is ignored."""
    index, remedy = folder / INDEX_FILE, "restore the original file"
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not index.exists():
        raise CheckpointError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; save the model as safetensors there"
        )
    try:
        names = sorted(set(read_object(index)["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name or name in ("", "..") or len(name) > 255]
    except UnreadableError as error:
        raise CheckpointError(f"{error}; {remedy}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of shards ({error}); {remedy}") from None
    if outside:
        raise CheckpointError(
            f"{index} names {shown(outside[0])}, which is not a file of its folder; {remedy}"
        )
    if not names:
        raise CheckpointError(f"{index} names no shard; {remedy}")
    return [folder / name for name in names]


def _disagreements(folder: Path, shape: ModelShape, tensors: dict[str, StoredTensor]) -> list[str]:
    """Return the differences between the stored tensors and those that `config.json` describes."""
    expected = {**shape.tensors, **shape.vision_tensors}
    if LM_HEAD in tensors and shape.tied_embeddings:
        expected[LM_HEAD] = expected[EMBEDDING]  # some exporters also store a tied head
    config, remedy = (
        folder / CONFIG_FILE,
        "config.json and weights must be of one model: restore the original pair",
    )
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected and not name.endswith(".inv_freq")]
    both = [tensors[name] for name in expected if name in tensors]
    problems = []
    if stacked := [name for name in unexpected if re.search(r"\.experts\.\D", name)]:
        problems.append(
            f"{folder}: {_listed(stacked)} stored with the experts of a layer in one tensor; experts must be tensors of"
            " their own: load the folder with transformers 5 and write it with save_pretrained"
        )
        missing = [name for name in missing if ".experts." not in name]
        unexpected = [name for name in unexpected if name not in stacked]
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
    return problems


def _listed(names: list[str]) -> str:
    """Return "3 tensors (a, b, c)", to be followed by a participle."""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({_joined(names)})"


def _joined(parts: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(parts) - MAX_LISTED} more" if len(parts) > MAX_LISTED else ""
    return separator.join(parts[:MAX_LISTED]) + more


def copy_companions(model: Path, tokenizer: Path, out: Path) -> None:
    """Copy the companions of a model's weights and of a tokenizer into a folder, replacing older ones."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for folder, names in ((model, MODEL_COMPANIONS), (tokenizer, TOKENIZER_COMPANIONS)):
        for name in names:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, partial / name)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
