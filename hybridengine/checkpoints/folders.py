"""Checkpoints of a run: one folder each, which gets its final name only when it is completely written.

RUN/checkpoints/step-00000020/
    manifest.json       size and SHA-256 of every other file
    run.json            step, roles, state of the dataflow, sizes, configuration, versions
    actor/              weights and optimizer state (PyTorch's distributed format), role.json, rng-RANK.pt,
                        files.json: files written by the ranks, present once all are
    critic/             the same
RUN/checkpoints/.step-00000030-1f2e3d4c.partial/   checkpoint being written, or abandoned; if run.json and every role's
                        files.json exist, only its name is missing
RUN/checkpoints/.step-00000010.deleted/            checkpoint being deleted
RUN/checkpoints/step-00000040.1f2e3d4c.damaged/    checkpoint whose files have changed since they were written
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from hybridengine.checkpoints.digests import FileDigest, check_files
from hybridengine.errors import CheckpointError

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST, RUN_STATE, ROLE_FILES = "manifest.json", "run.json", "files.json"
NAME = re.compile(r"step-(\d{8,})")


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="constants")


Kept = TypeVar("Kept", bound=_Kept)


def _beneath(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name} is not beneath the checkpoint")
    return name


class FileList(_Kept):
    """Contents of manifest.json, and of files.json, whose presence marks a role as complete."""

    format: Literal[1] = 1
    """Version of the folder format; readers reject others."""
    files: dict[Annotated[str, AfterValidator(_beneath)], FileDigest]
    """Path beneath the folder -> digest."""


class Best(_Kept):
    """Checkpoint with the highest value of the selected metric."""

    step: int | None = None
    value: float | None = None
    metric: str | None = None
    """Name of the metric."""


class DataState(_Kept):
    """Progress of a run through its prompts."""

    prompts_drawn: Annotated[int, Field(ge=0)] = 0
    """Prompts drawn in all iterations; not iterations times batch size if a resumed run changed the latter."""
    batch_size: int | None = None
    seed: int | None = None
    sha256: str | None = None
    """Digest of the prompt file; None if unknown."""


class RunState(_Kept):
    """Contents of run.json: the state of a run except its models."""

    format: Literal[1] = 1
    step: int
    """Number of completed iterations; 0 for a converted checkpoint."""
    roles: tuple[str, ...] = ()
    """Roles with a folder; empty for a converted checkpoint."""
    state: dict[str, float] = {}
    """Numbers that the dataflow carries over between iterations."""
    best: Best = Best()
    data: DataState = DataState()
    config: dict[str, Any] = {}
    """The run's configuration without secrets; empty for a converted checkpoint."""
    versions: dict[str, str] = {}
    """Versions of the packages that the run depends on."""
    source: str | None = None
    """Hugging Face folder that the checkpoint was converted from, if any."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a manifest, whose files may be damaged."""

    folder: Path
    step: int

    def check(self) -> None:
        """Check all files against the manifest; CheckpointError with the reason why the checkpoint cannot be used."""
        try:
            expected = read_kept(self.folder / MANIFEST, FileList).files
            check_files(self.folder, expected)
            step = self.run_state().step
        except OSError as error:
            raise CheckpointError(f"a file cannot be read ({error})") from None
        if more := [name for name in files_beneath(self.folder) if name not in {*expected, MANIFEST}]:
            raise CheckpointError(f"{more[0]} is there, and {MANIFEST} does not list it")
        if step != self.step:
            raise CheckpointError(f"{RUN_STATE} says step {step}: the folder has another one's name")

    def num_bytes(self) -> int:
        """Return the total size of the files that the manifest lists."""
        return sum(one.num_bytes for one in read_kept(self.folder / MANIFEST, FileList).files.values())

    def run_state(self) -> RunState:
        """Return the contents of run.json; CheckpointError if they are invalid."""
        return read_kept(self.folder / RUN_STATE, RunState)


def checkpoint_at(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder; CheckpointError if there is none."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}; name a folder such as runs/NAME/checkpoints/step-00000020"
        )
    found = NAME.fullmatch(folder.resolve().name)
    return Checkpoint(folder, int(found[1]) if found else read_kept(folder / RUN_STATE, RunState).step)


def checkpoints_in(run_folder: Path) -> list[Checkpoint]:
    """Return all checkpoints of a run that have a manifest, newest first."""
    folder = run_folder / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    named = [(one, NAME.fullmatch(one.name)) for one in folder.iterdir() if (one / MANIFEST).is_file()]
    found = [Checkpoint(one, int(name[1])) for one, name in named if name]
    return sorted(found, key=lambda one: -one.step)


def files_beneath(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if not one.is_dir())


def read_kept(file: Path, kind: type[Kept]) -> Kept:
    """Return a JSON file of a checkpoint: CheckpointError if missing or invalid, OSError if unreadable at present."""
    try:
        return kind.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; use a complete checkpoint") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{file.name} cannot be read ({f'{key}: ' if key else ''}{first['msg']}); use a complete checkpoint"
        ) from None


def write_kept(file: Path, value: _Kept) -> None:
    """Write a JSON file of a checkpoint, and flush it to disk."""
    with file.open("w") as opened:
        opened.write(value.model_dump_json(indent=1) + "\n")
        opened.flush()
        os.fsync(opened.fileno())
