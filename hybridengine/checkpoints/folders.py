"""The checkpoints of a run: one folder for each, which appears under its name only when everything in it is written.

RUN/checkpoints/step-00000020/
    manifest.json       size and SHA-256 of every other file
    run.json            step, roles, numbers that the dataflow keeps, sizes, configuration, versions
    actor/              weights and optimizer state (Megatron-core's dist_checkpointing), role.json, rng-RANK,
                        files.json: what its ranks wrote, there once all have
    critic/             the same
RUN/checkpoints/.step-00000030-1f2e3d4c.partial/   one that is still being written, or whose writer has died; it only
                        lacks its name where run.json and every role's files.json are there
RUN/checkpoints/.step-00000010.deleted/            one that is being deleted
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.checkpoints.digests import FileDigest, check_files
from hybridengine.errors import CheckpointError, UnreadableError
from hybridengine.reading import parse_json

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST, RUN_STATE, ROLE_FILES = "manifest.json", "run.json", "files.json"
FORMAT = 1
"""Of the folder; readers refuse others."""
_NAME = re.compile(r"step-(\d{8,})")


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
        manifest = _json_of(self.folder / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"{MANIFEST} says format {manifest.get('format')!r}, this version reads {FORMAT}"
            )
        expected = listed_files(manifest, MANIFEST)
        if RUN_STATE not in expected:
            raise CheckpointError(f"{MANIFEST} does not list {RUN_STATE}")
        try:
            check_files(self.folder, expected)
        except OSError as error:
            raise CheckpointError(f"a file that {MANIFEST} lists cannot be read ({error.strerror})") from None
        listed = {*expected, MANIFEST}
        more = [name for name in files_beneath(self.folder) if name not in listed]
        if more:
            raise CheckpointError(f"{more[0]} is there, and {MANIFEST} does not list it")
        if (step := self.run_state().get("step")) != self.step:
            raise CheckpointError(f"{RUN_STATE} says step {step!r}: the folder has another one's name")

    def num_bytes(self) -> int:
        """Of all files that the manifest lists.

        Raises:
            CheckpointError: it cannot be read.
        """
        return sum(one.num_bytes for one in listed_files(_json_of(self.folder / MANIFEST), MANIFEST).values())

    def run_state(self) -> dict[str, Any]:
        """Contents of run.json.

        Raises:
            CheckpointError: it is no JSON object, or its configuration is none.
        """
        found = _json_of(self.folder / RUN_STATE)
        if not isinstance(found.get("config", {}), dict):
            raise CheckpointError(
                f"{self.folder / RUN_STATE} has no configuration; use a complete checkpoint"
            )
        return found


def checkpoint_at(folder: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        CheckpointError: there is none.
    """
    found = _NAME.fullmatch(folder.resolve().name)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}; name a folder such as runs/NAME/checkpoints/step-00000020"
        )
    step = int(found[1]) if found else _json_of(folder / RUN_STATE).get("step", 0)
    if not isinstance(step, int):
        raise CheckpointError(
            f"{folder / RUN_STATE} says step {step!r}, which is no number; use a complete checkpoint"
        )
    return Checkpoint(folder, step)


def checkpoints_in(run_folder: Path) -> list[Checkpoint]:
    """All checkpoints of a run that have a manifest, newest first."""
    folder = run_folder / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    named = [(one, _NAME.fullmatch(one.name)) for one in folder.iterdir() if (one / MANIFEST).is_file()]
    found = [Checkpoint(one, int(name[1])) for one, name in named if name]
    return sorted(found, key=lambda one: -one.step)


def newest_complete(run_folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint whose files are all as they were written; None where there is none.

    Args:
        warn: told of each one that is left out, and why.

    Raises:
        CheckpointError: there is a file where the folder of checkpoints should be.
    """
    folder = run_folder / CHECKPOINTS_FOLDER
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; move it away, so that checkpoints have a place")
    if folder.is_dir():
        for one in sorted(folder.iterdir(), reverse=True):
            if _NAME.match(one.name) and not (one / MANIFEST).is_file():
                why = f"incomplete ({MANIFEST} is missing)" if one.is_dir() else "a file"
                warn(f"checkpoint {one.name} is {why}; left out")
    for checkpoint in checkpoints_in(run_folder):
        try:
            checkpoint.check()
        except CheckpointError as error:
            warn(f"checkpoint {checkpoint.folder.name} is damaged ({error}); left out")
        else:
            return checkpoint
    return None


def files_beneath(folder: Path) -> list[str]:
    """Relative paths of all files."""
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if not one.is_dir())


def listed_files(found: Mapping[str, Any], where: str) -> dict[str, FileDigest]:
    """Files beneath the folder in which a list of them lies.

    Raises:
        CheckpointError: it is no such list.
    """
    files = found.get("files")
    try:
        if not isinstance(files, dict):
            raise TypeError
        listed = {str(name): FileDigest(int(size), str(digest)) for name, (size, digest) in files.items()}
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(f"{where} has no size and digest for each file") from None
    for name in listed:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{where} lists {name}, which is not beneath the checkpoint")
    return listed


def _json_of(file: Path) -> dict[str, Any]:
    """What a file of a checkpoint says.

    Raises:
        CheckpointError: nothing, or it cannot be read.
    """
    try:
        return parsed_json(file)
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read ({error})") from None


def parsed_json(file: Path) -> dict[str, Any]:
    """As `_json_of`.

    Raises:
        CheckpointError: it says nothing.
        OSError: it cannot be read, now.
    """
    try:
        found = parse_json(file.read_bytes())
    except UnreadableError as error:
        raise CheckpointError(f"{file.name} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file.name} is no JSON object")
    return found
