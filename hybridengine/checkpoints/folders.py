"""The checkpoints of a run: one folder for each, which appears under its name only when everything in it is written.

RUN/checkpoints/step-00000020/
    manifest.json       size and SHA-256 of every other file
    run.json            step, numbers that the dataflow keeps, sizes, configuration, versions
    actor/              weights and optimizer state (Megatron-core's dist_checkpointing), role.json, rng-RANK
    critic/             the same
RUN/checkpoints/.step-00000030-1f2e3d4c.partial/   one that is still being written, or whose writer has died
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.checkpoints.digests import FileDigest, check_files, digests_json, settled_digests, sync
from hybridengine.errors import CheckpointError, ConfigError

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST, RUN_STATE = "manifest.json", "run.json"
LOCK_FILE = "run.lock"
NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
"""What file systems say that know no locks."""
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
        files = manifest.get("files")
        if not isinstance(files, dict) or RUN_STATE not in files:
            raise CheckpointError(f"{MANIFEST} does not list {RUN_STATE}")
        try:
            expected = {
                str(name): FileDigest(int(size), str(digest)) for name, (size, digest) in files.items()
            }
        except (TypeError, ValueError, OverflowError):
            raise CheckpointError(f"{MANIFEST} has no size and digest for each file") from None
        for name in expected:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(f"{MANIFEST} lists {name}, which is not beneath the checkpoint")
        try:
            check_files(self.folder, expected)
        except OSError as error:
            raise CheckpointError(f"a file that {MANIFEST} lists cannot be read ({error.strerror})") from None
        listed = {*expected, MANIFEST}
        more = [name for name in _files_beneath(self.folder) if name not in listed]
        if more:
            raise CheckpointError(f"{more[0]} is there, and {MANIFEST} does not list it")
        if (step := self.run_state().get("step")) != self.step:
            raise CheckpointError(f"{RUN_STATE} says step {step!r}: the folder has another one's name")

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
            if one.name.endswith(".partial"):
                warn(
                    f"checkpoint {one.name} is incomplete (its run, or its ranks, ended while it was written); left out"
                )
            elif _NAME.match(one.name) and not (one / MANIFEST).is_file():
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


@contextlib.contextmanager
def run_lock(run_folder: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """While open, no other process on a machine that sees the folder carries out the same run.

    Args:
        warn: told where the file system has no locks, and nobody else would be refused.

    Raises:
        ConfigError: one does, or the folder cannot be written to.
    """
    with contextlib.ExitStack() as ends:
        try:
            file = ends.enter_context((run_folder / LOCK_FILE).open("a+b", buffering=0))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                warn(
                    f"{run_folder} is on a file system without locks ({error.strerror}): see to it that the run is"
                    " started once, or mount it with locks (NFS: not nolock; Lustre: flock)"
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except BlockingIOError:
            owner = (run_folder / LOCK_FILE).read_text().strip() or "another process"
            raise ConfigError(
                f"{run_folder} is being carried out by {owner}; wait until it has ended, or choose another run.name;"
                f" where that machine is gone for good, remove {LOCK_FILE}"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{run_folder} cannot be written to ({error.strerror}); make room there, or name another run.folder"
            ) from None
        yield
        file.truncate(0)


def begin_checkpoint(run_folder: Path, step: int, roles: Iterable[str] = ()) -> Path:
    """A folder to write a checkpoint into, with one for each role, beside the complete ones and under another name.

    No attempt has the name of another: ranks of a node that was thought to be lost may still be writing.

    Raises:
        OSError: it cannot be made.
    """
    name = f".{_folder_name(step)}-{secrets.token_hex(4)}.partial"
    partial = run_folder / CHECKPOINTS_FOLDER / name
    try:
        partial.mkdir(parents=True)
        for role in roles:
            (partial / role).mkdir()
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial


def complete_checkpoint(
    partial: Path,
    step: int,
    run_state: Mapping[str, Any],
    digests: Mapping[str, FileDigest],
    named: Path | None = None,
) -> Checkpoint:
    """Write run.json and the manifest, and give the folder its name.

    Args:
        digests: of the files that its writers know; others are read.
        named: the folder's name; that of its step where left out.

    Raises:
        OSError: writing failed; the folder keeps its temporary name.
    """
    _write_json(partial / RUN_STATE, {"format": FORMAT, "step": step, **run_state})
    others = [name for name in _files_beneath(partial) if name not in digests]
    known = {**digests, **settled_digests(partial, others)}
    _write_json(partial / MANIFEST, {"format": FORMAT, "files": digests_json(known)})
    for folder in [*(one for one in partial.rglob("*") if one.is_dir()), partial]:
        sync(folder)
    named = named or partial.parent / _folder_name(step)
    if named.exists():  # of an attempt that was damaged later
        shutil.rmtree(named)
    partial.rename(named)
    sync(named.parent)
    return Checkpoint(named, step)


def prune(
    run_folder: Path, keep: int, best_step: int | None, ignored: Collection[int] = frozenset()
) -> list[int]:
    """Delete checkpoints beyond the newest `keep` and the best one; steps of those that are gone.

    Args:
        ignored: steps of checkpoints that take no place and stay: damaged ones.
    """
    deleted = []
    counted = [one for one in checkpoints_in(run_folder) if one.step not in ignored]
    for checkpoint in counted[keep:]:
        if checkpoint.step != best_step:
            # First the name that readers look for: what is half deleted is no checkpoint.
            gone = checkpoint.folder.with_name(f".{checkpoint.folder.name}.partial")
            shutil.rmtree(gone, ignore_errors=True)
            checkpoint.folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
            deleted.append(checkpoint.step)
    return deleted


def drop_partial(run_folder: Path) -> None:
    """Delete what was never completed."""
    folder = run_folder / CHECKPOINTS_FOLDER
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _files_beneath(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if not one.is_dir())


def _json_of(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file.name} is no JSON object")
    return found


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    with file.open("w") as opened:
        json.dump(value, opened, indent=1)
        opened.write("\n")
        opened.flush()
        os.fsync(opened.fileno())
