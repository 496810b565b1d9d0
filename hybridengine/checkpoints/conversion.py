"""Conversion between Hugging Face checkpoints and run checkpoints, a few tensors at a time.

checkpoint to Hugging Face     weights of one role, without optimizer state
Hugging Face to checkpoint     initial weights for a run with resume=FOLDER, with fresh optimizers
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from hybridengine.checkpoints.folders import RUN_STATE, Checkpoint, RunState, write_kept
from hybridengine.checkpoints.hf_files import (
    HfWriter,
    SafetensorsFolder,
    check_weights,
    frozen_tensors,
    gone_on_failure,
    type_of,
)
from hybridengine.checkpoints.making import complete_checkpoint
from hybridengine.checkpoints.peft_files import PeftWriter
from hybridengine.checkpoints.tensors import TensorFolder
from hybridengine.errors import CheckpointError, UnreadableError
from hybridengine.families.family import is_float32
from hybridengine.families.sizes import AdapterSizes, ExpertSizes, LatentSizes, Multipliers, VisionSizes
from hybridengine.files import read_object
from hybridengine.models.checkpoint_files import COMPANIONS_FOLDER, CONFIG_FILE, checkpoint_problems
from hybridengine.models.shapes import LM_HEAD, SCORE_HEAD, ModelShape
from hybridengine.reshard.boxes import full_box

ROLE_FILE = "role.json"
WEIGHTS = "weights"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Told = Callable[[int, int], None]
"""Progress callback, called with the bytes completed and the total."""


def read_role(folder: Path) -> dict[str, Any]:
    """Return the contents of a role's role.json; CheckpointError if it is missing or unreadable."""
    try:
        return read_object(folder / ROLE_FILE)
    except FileNotFoundError:
        raise CheckpointError(f"{folder / ROLE_FILE} does not exist; use a complete checkpoint") from None
    except UnreadableError as error:
        raise CheckpointError(f"{error}; use a complete checkpoint") from None


def read_role_of(folder: Path, shape: ModelShape, dtype: str) -> dict[str, Any]:
    """Return the contents of a role's role.json, as `read_role` does; CheckpointError if it is of another model."""
    role = read_role(folder)
    found, own = role.get("shape") or {}, json.loads(json.dumps(asdict(shape)))
    problems = [
        f"{key} is {found.get(key)!r}, not {value!r}" for key, value in own.items() if found.get(key) != value
    ]
    if role.get("dtype") != dtype:
        problems.append(f"dtype is {role.get('dtype')}, not {dtype}")
    if problems:
        raise CheckpointError(
            f"{folder} is the checkpoint of another model: {'; '.join(problems)}; use this model's checkpoint,"
            " in the type of model.dtype (adapters: with the actor.lora of its run)"
        )
    return role


def shape_of_role(role: Mapping[str, Any]) -> ModelShape:
    """Return the shape in the contents of a role.json."""
    shape = dict(role["shape"])
    kinds = {
        "experts": ExpertSizes,
        "latent": LatentSizes,
        "adapters": AdapterSizes,
        "multipliers": Multipliers,
        "vision": VisionSizes,
    }
    parts = {key: kind(**_tuples(shape[key])) for key, kind in kinds.items() if shape.get(key)}
    return ModelShape(**{**_tuples(shape), **parts})


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with lists as tuples, as they were before they were written."""
    return {
        key: tuple(tuple(one) if isinstance(one, list) else one for one in value)
        if isinstance(value, list)
        else value
        for key, value in values.items()
    }


def role_folder(checkpoint: Checkpoint, role: str) -> Path:
    """Return the folder of a role; CheckpointError if the checkpoint lacks it."""
    folder = checkpoint.folder / role
    if not folder.is_dir():
        there = ", ".join(sorted(one.name for one in checkpoint.folder.iterdir() if one.is_dir()))
        raise CheckpointError(f"{checkpoint.folder} has no role {role}; choose from {there}")
    return folder


def export_role(
    checkpoint: Checkpoint,
    role: str,
    out: Path,
    *,
    dtype: str | None = None,
    max_file_bytes: int = 4 * 2**30,
    companions: Path | None = None,
    progress: Told = lambda done, total: None,
) -> None:
    """Write the weights of a role as a Hugging Face checkpoint, or its adapters as a PEFT folder.

    Args:
        dtype: type of the files; the checkpoint's by default.
        companions: folder with the model's configuration, tokenizer and card.

    Raises:
        CheckpointError: the checkpoint lacks the role or a tensor, or the configuration describes another model.
    """
    folder = role_folder(checkpoint, role)
    tensors, prefix = TensorFolder(folder), f"{WEIGHTS}."
    shapes = {
        name.removeprefix(prefix): size for name, size in tensors.shapes.items() if name.startswith(prefix)
    }
    if not shapes:
        raise CheckpointError(f"{folder} has no weights; use a complete checkpoint")
    role_json = read_role(folder)
    whole = shape_of_role(role_json)
    shape = whole if whole.adapters else None
    if companions is not None and shape is None:
        _check_same_model(companions, shapes)
    if whole.vision and (companions is None or checkpoint_problems(companions)):
        raise CheckpointError(
            f"{folder} is of a model that reads images, whose vision tower no checkpoint of a run has; give --companions"
            " with the folder of the model that the run started from, weights included"
        )
    stored = tensors.dtypes[f"{prefix}{min(shapes, key=is_float32)}"]
    ordered, written_as = dict(sorted(shapes.items())), DTYPES[dtype] if dtype else stored
    files = (
        HfWriter(
            out,
            dict(sorted({**shapes, **whole.vision_tensors}.items())),
            written_as,
            max_file_bytes,
            companions,
        )
        if shape is None
        else PeftWriter(out, shape, written_as, role_json.get("base", ""))
    )
    with files as writer:
        for name, size in ordered.items():
            writer.write(name, tensors.read(f"{prefix}{name}", full_box(size)))
            progress(writer.written_bytes, writer.total_bytes)
        for name, tensor in frozen_tensors(whole, companions or ""):
            writer.write(name, tensor)


def _check_same_model(companions: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    described = dict(ModelShape.from_folder(companions).tensors)
    for name in sorted({*described, *shapes} - {LM_HEAD, SCORE_HEAD}):
        if described.get(name) != shapes.get(name):
            there, here = (
                "missing" if size is None else str(list(size))
                for size in (described.get(name), shapes.get(name))
            )
            raise CheckpointError(
                f"{companions} is of another model: {name} is {there} there and {here} in the checkpoint; give"
                " --companions with the model's own configuration"
            )


def import_model(
    source: Path, out: Path, *, dtype: str, role: str = "actor", progress: Told = lambda done, total: None
) -> Checkpoint:
    """Write a Hugging Face checkpoint as a checkpoint from which a run can start.

    Args:
        out: folder that does not exist yet.
        dtype: type of the weights of the run that will read the checkpoint.

    Raises:
        CheckpointError: the source is incomplete, or has non-finite weights.
    """
    shape = check_weights(source)
    files = SafetensorsFolder(source)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    folder = partial / role
    folder.mkdir(parents=True)
    with gone_on_failure(partial):
        reader = _LazyReader(files, shape, DTYPES[dtype], progress)
        empty = {
            f"{WEIGHTS}.{name}": torch.empty(size, dtype=type_of(name, DTYPES[dtype]), device="meta")
            for name, size in shape.tensors.items()
        }
        # Torch's writer holds the tensors of a file in memory until the file is complete.
        writer = FileSystemWriter(folder, single_file_per_rank=False, per_thread_copy_ahead=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a single process, as no_dist implies
            try:
                dcp.save(empty, storage_writer=writer, planner=reader, no_dist=True)
            except CheckpointException as error:
                raise _first_cause(error) from None
        (folder / ROLE_FILE).write_text(json.dumps({"shape": asdict(shape), "dtype": dtype}, indent=1) + "\n")
        write_kept(partial / RUN_STATE, RunState(step=0, source=str(source)))
        return complete_checkpoint(partial, out)


def _first_cause(error: CheckpointException) -> BaseException:
    """Return the error that torch wrapped after it failed to close the file."""
    failure, _ = next(iter(error.failures.values()))
    while failure.__context__ is not None:
        failure = failure.__context__
    return failure


class _LazyReader(DefaultSavePlanner):
    """Save planner that reads each tensor when it is written."""

    def __init__(
        self, files: SafetensorsFolder, shape: ModelShape, dtype: torch.dtype, progress: Told
    ) -> None:
        super().__init__()
        self._files, self._shape, self._dtype, self._progress = files, shape, dtype, progress
        self._total = sum(
            math.prod(size) * type_of(name, dtype).itemsize for name, size in shape.tensors.items()
        )
        self._done = 0

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the actual tensor in place of the empty one used for planning."""
        name = write_item.index.fqn.removeprefix(f"{WEIGHTS}.")
        # A copy: safetensors may return a part of a mapped file, which torch would save as a whole.
        tensor = self._files.read(name, full_box(self._shape.tensors[name])).to(
            type_of(name, self._dtype), copy=True
        )
        self._done += tensor.numel() * tensor.element_size()
        self._progress(self._done, self._total)
        return tensor


def default_companions(checkpoint: Checkpoint) -> Path | None:
    """Return the folder of the model's configuration and tokenizer next to a run's checkpoints, or None without one."""
    place = checkpoint.folder.resolve().parent.parent / COMPANIONS_FOLDER
    return place if (place / CONFIG_FILE).is_file() else None
