"""The checkpoints of a run: one folder for each, which appears under its name only when everything in it is written.

RUN/checkpoints/step-00000020/
    manifest.json       size and SHA-256 of every other file
    run.json            step, roles, numbers that the dataflow keeps, sizes, configuration, versions
    actor/              weights and optimizer state (PyTorch's distributed format), role.json, rng-RANK.pt,
                        files.json: what its ranks wrote, there once all have
    critic/             the same
RUN/checkpoints/.step-00000030-1f2e3d4c.partial/   one that is still being written, or whose writer has died; it only
                        lacks its name where run.json and every role's files.json are there
RUN/checkpoints/.step-00000010.deleted/            one that is being deleted
RUN/checkpoints/step-00000040.1f2e3d4c.damaged/    one that is no longer as it was written
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
_NAME = re.compile(r"step-(\d{8,})")


class _Kept(BaseModel):
    """The contents of a JSON file of a checkpoint."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="constants")


Kept = TypeVar("Kept", bound=_Kept)


def _beneath(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name} is not beneath the checkpoint")
    return name


class FileList(_Kept):
    """Contents of manifest.json, and of files.json, by which a role is whole."""

    format: Literal[1] = 1
    """Form of the folder; readers refuse others."""
    files: dict[Annotated[str, AfterValidator(_beneath)], FileDigest]
    """Path beneath the folder -> digest."""


class Best(_Kept):
    """The checkpoint with the highest value of the metric that decides."""

    step: int | None = None
    value: float | None = None
    metric: str | None = None
    """Name of that metric."""


class DataState(_Kept):
    """The prompts of a run so far."""

    prompts_drawn: Annotated[int, Field(ge=0)] = 0
    """Prompts of all iterations; not their number times the batch size, where a run has resumed with another one."""
    batch_size: int | None = None
    seed: int | None = None
    sha256: str | None = None
    """Digest of the file of prompts; None where it is not known."""


class RunState(_Kept):
    """Contents of run.json: the state of a run beside its models."""

    format: Literal[1] = 1
    step: int
    """Iterations that are complete; 0 for a converted checkpoint, which has trained nothing."""
    roles: tuple[str, ...] = ()
    """Roles with a folder; empty for a converted checkpoint."""
    state: dict[str, float] = {}
    """Numbers that the dataflow keeps."""
    best: Best = Best()
    data: DataState = DataState()
    config: dict[str, Any] = {}
    """The run's configuration without secrets; empty for a converted checkpoint."""
    versions: dict[str, str] = {}
    """Versions of the packages that the run depends on."""
    source: str | None = None
    """Hugging Face folder that the checkpoint was converted from."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a manifest, which may still be damaged."""

    folder: Path
    step: int

    def check(self) -> None:
        """Check every file against the manifest.

        Raises:
            CheckpointError: why it cannot be used.
        """
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
        """Return the size of all files that the manifest lists."""
        return sum(one.num_bytes for one in read_kept(self.folder / MANIFEST, FileList).files.values())

    def run_state(self) -> RunState:
        """Return the contents of run.json.

        Raises:
            CheckpointError: it has other contents.
        """
        return read_kept(self.folder / RUN_STATE, RunState)


def checkpoint_at(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder.

    Raises:
        CheckpointError: there is none.
    """
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}; name a folder such as runs/NAME/checkpoints/step-00000020"
        )
    found = _NAME.fullmatch(folder.resolve().name)
    return Checkpoint(folder, int(found[1]) if found else read_kept(folder / RUN_STATE, RunState).step)


def checkpoints_in(run_folder: Path) -> list[Checkpoint]:
    """Return all checkpoints of a run that have a manifest, newest first."""
    folder = run_folder / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    named = [(one, _NAME.fullmatch(one.name)) for one in folder.iterdir() if (one / MANIFEST).is_file()]
    found = [Checkpoint(one, int(name[1])) for one, name in named if name]
    return sorted(found, key=lambda one: -one.step)


def files_beneath(folder: Path) -> list[str]:
    """Return the relative paths of all files."""
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if not one.is_dir())


def read_kept(file: Path, kind: type[Kept]) -> Kept:
    """Return the contents of a JSON file of a checkpoint.

    Raises:
        CheckpointError: it has other contents.
        OSError: it cannot be read, now.
    """
    try:
        return kind.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{file.name} cannot be read ({f'{key}: ' if key else ''}{first['msg']}); use a complete checkpoint"
        ) from None


def write_kept(file: Path, value: _Kept) -> None:
    """Write a JSON file of a checkpoint, to the disk.

    Raises:
        OSError: that failed.
    """
    with file.open("w") as opened:
        opened.write(value.model_dump_json(indent=1) + "\n")
        opened.flush()
        os.fsync(opened.fileno())
