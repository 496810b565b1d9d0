"""The life of a checkpoint: begun, written by ranks, named, pruned; and the repair of a folder after a crash."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from hybridengine.checkpoints.digests import FileDigest, settle, settled_digests
from hybridengine.checkpoints.folders import (
    CHECKPOINTS_FOLDER,
    MANIFEST,
    ROLE_FILES,
    RUN_STATE,
    Checkpoint,
    FileList,
    RunState,
    checkpoints_in,
    files_beneath,
    read_kept,
    write_kept,
)
from hybridengine.errors import CheckpointError

PARTIAL, DELETED, DAMAGED = ".partial", ".deleted", ".damaged"
"""Ends of the names of folders that are no checkpoints yet, or no longer."""


def begin_checkpoint(run_folder: Path, state: RunState) -> Path:
    """Return a folder to write a checkpoint into, with one for each role, beside the complete ones.

    No attempt has the name of another: ranks of a node that was thought to be lost may still be writing.

    Raises:
        OSError: it cannot be made.
    """
    name = f".{_folder_name(state.step)}-{secrets.token_hex(4)}{PARTIAL}"
    partial = run_folder / CHECKPOINTS_FOLDER / name
    try:
        partial.mkdir(parents=True)
        for role in state.roles:
            (partial / role).mkdir()
        write_kept(partial / RUN_STATE, state)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial


def end_role(folder: Path, digests: Mapping[str, FileDigest]) -> None:
    """Say that all ranks have written a role, and which files; from now on it is whole.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = folder / f".{ROLE_FILES}"
    write_kept(unfinished, FileList(files=dict(digests)))
    unfinished.rename(folder / ROLE_FILES)
    settle(folder)


def complete_checkpoint(partial: Path, named: Path | None = None) -> Checkpoint:
    """Write the manifest of a folder that has everything else, and give it its name.

    Args:
        named: that name; the one of its step where left out.

    Raises:
        CheckpointError: it lacks something.
        OSError: writing failed; the folder keeps its temporary name.
    """
    state = read_kept(partial / RUN_STATE, RunState)
    known = dict[str, FileDigest]()
    for role in state.roles:
        if not (partial / role / ROLE_FILES).is_file():
            raise CheckpointError(f"{role}/{ROLE_FILES} is missing")
        files = read_kept(partial / role / ROLE_FILES, FileList).files
        known |= {f"{role}/{name}": digest for name, digest in files.items()}
    for name, digest in known.items():
        if not (partial / name).is_file() or (partial / name).stat().st_size != digest.num_bytes:
            raise CheckpointError(f"{name} is not as it was written")
    others = [name for name in files_beneath(partial) if name not in known and name != MANIFEST]
    known |= settled_digests(partial, others)
    write_kept(partial / MANIFEST, FileList(files=known))
    for folder in [*(one for one in partial.rglob("*") if one.is_dir()), partial]:
        settle(folder)
    named = named or partial.parent / _folder_name(state.step)
    if named.exists():  # of an attempt that was damaged later
        discard(named)
    partial.rename(named)
    with contextlib.suppress(OSError):  # whoever finds it without its name gives it once more
        settle(named.parent)
    return Checkpoint(named, state.step)


def discard(folder: Path) -> None:
    """Delete a folder that is no checkpoint, or no longer.

    First its name goes: what is half deleted is never taken for a whole one, and late ranks write no more into it. What
    cannot lose its name stays.
    """
    gone = folder.with_name(f".{folder.name.removesuffix(PARTIAL).lstrip('.')}{DELETED}")
    with contextlib.suppress(OSError):
        shutil.rmtree(gone, ignore_errors=True)
        shutil.rmtree(folder.rename(gone), ignore_errors=True)


def settle_checkpoints(run_folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint that a run resumes from, None where there is none; what was never completed is deleted.

    Those that only lack their name get it: all ranks had written them when their run, or its ranks, ended.

    Args:
        say: told of those, and of each one that is left out, and why.

    Raises:
        CheckpointError: there is a file where the folder of checkpoints should be.
    """
    for partial in _unfinished(run_folder, PARTIAL):
        if not _is_written(partial):
            say(
                f"warning: checkpoint {partial.name} is incomplete (its run, or its ranks, ended while it was written);"
                " left out"
            )
            discard(partial)
    for gone in _unfinished(run_folder, DELETED):
        shutil.rmtree(gone, ignore_errors=True)
    name_written(run_folder, say)
    return newest_complete(run_folder, lambda text: say(f"warning: {text}"))


def newest_complete(run_folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint whose files are all as they were written; None where there is none.

    A damaged one loses its name, so that it takes no place among those that are kept, and is written again.

    Args:
        warn: told of each one that is left out, and why.

    Raises:
        CheckpointError: there is a file where the folder of checkpoints should be.
    """
    folder = run_folder / CHECKPOINTS_FOLDER
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; move it away, so that checkpoints have a place")
    for checkpoint in checkpoints_in(run_folder):
        try:
            checkpoint.check()
            return checkpoint
        except CheckpointError as error:
            name = checkpoint.folder.name
            warn(f"checkpoint {name} is damaged ({error}); left out")
            with contextlib.suppress(OSError):  # of a disk that changes nothing, and deletes nothing either
                checkpoint.folder.rename(folder / f"{name}.{secrets.token_hex(4)}{DAMAGED}")
    return None


def name_written(run_folder: Path, say: Callable[[str], None]) -> None:
    """Give their names to checkpoints that lack nothing else; those of whose step there is one are deleted.

    Args:
        say: told of each, and of each one that cannot have it, which stays as it is.
    """
    for partial in filter(_is_written, _unfinished(run_folder, PARTIAL)):
        try:
            step = read_kept(partial / RUN_STATE, RunState).step
            if step in [one.step for one in checkpoints_in(run_folder)]:
                discard(partial)
                continue
            named = complete_checkpoint(partial).folder.name
        except CheckpointError as error:
            say(f"warning: checkpoint {partial.name} is damaged ({error}); left out")
            discard(partial)
        except OSError as error:
            say(
                f"warning: checkpoint {partial} was written but could not be renamed: {error}; it will be renamed at the"
                " next save"
            )
        else:
            say(
                f"{named} was written, but its run, or its ranks, ended before it had its name; it has it now"
            )


def _is_written(partial: Path) -> bool:
    """Return True if all ranks have written all roles."""
    roles = [one for one in partial.iterdir() if one.is_dir()]
    return bool(roles) and all((role / ROLE_FILES).is_file() for role in roles)


def prune(run_folder: Path, keep: int, best_step: int | None) -> list[int]:
    """Delete checkpoints beyond the newest `keep` and the best one; return the steps of those that are gone."""
    deleted = [one for one in checkpoints_in(run_folder)[keep:] if one.step != best_step]
    for checkpoint in deleted:
        discard(checkpoint.folder)
    return [one.step for one in deleted]


def _unfinished(run_folder: Path, ending: str) -> list[Path]:
    """Return the folders of checkpoints that have no name yet, or no longer one."""
    found = (run_folder / CHECKPOINTS_FOLDER).glob(f".step-*{ending}")
    return sorted(one for one in found if one.is_dir())


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"
