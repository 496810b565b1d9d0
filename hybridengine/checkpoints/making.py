"""Life cycle of a checkpoint: creation, writing by ranks, naming, pruning, and repair of a folder after a crash."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from hybridengine.checkpoints.digests import DamagedError, FileDigest, settle, settled_digests
from hybridengine.checkpoints.folders import (
    CHECKPOINTS_FOLDER,
    MANIFEST,
    NAME,
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
"""Name suffixes of folders that are not complete checkpoints, or no longer."""


def begin_checkpoint(run_folder: Path, state: RunState) -> Path:
    """Return a new folder with one per role; its name is unique, because lost ranks may still write to an earlier one."""
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
    """Record the files of a role that all ranks have written, which marks the role as complete."""
    unfinished = folder / f".{ROLE_FILES}"
    write_kept(unfinished, FileList(files=dict(digests)))
    unfinished.rename(folder / ROLE_FILES)
    settle(folder)


def complete_checkpoint(partial: Path, named: Path | None = None) -> Checkpoint:
    """Write the manifest of a folder that has all other files, and rename it to `named` or the name of its step.

    Raises CheckpointError if a file is missing, and OSError if writing failed; the folder then keeps its temporary name.
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
    if named.exists():  # an earlier attempt that was damaged later
        discard(named)
    partial.rename(named)
    with contextlib.suppress(OSError):  # the next reader renames it
        settle(named.parent)
    return Checkpoint(named, state.step)


def discard(folder: Path) -> None:
    """Delete a folder that is not a complete checkpoint, or no longer.

    It is renamed first, so that a partly deleted folder is never taken for a complete one, and late ranks stop writing
    into it. A folder that cannot be renamed is kept.
    """
    with contextlib.suppress(OSError):
        shutil.rmtree(_renamed(folder), ignore_errors=True)


def _renamed(folder: Path) -> Path:
    gone = folder.with_name(f".{folder.name.removesuffix(PARTIAL).lstrip('.')}{DELETED}")
    shutil.rmtree(gone, ignore_errors=True)
    return folder.rename(gone)


def settle_checkpoints(run_folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint from which a run resumes, or None; delete checkpoints that were never completed.

    Checkpoints that only lack their final name are renamed: all ranks had written them when the run or its ranks ended.
    Raises CheckpointError if the path of the checkpoints folder is a file.
    """
    for partial in _unfinished(run_folder, PARTIAL):
        if not _is_written(partial):
            say(
                f"warning: checkpoint {partial.name} is incomplete (its run, or its ranks, ended while it was written);"
                " left out"
            )
            with contextlib.suppress(OSError):  # a read-only disk: it is kept
                gone = _renamed(partial)
                if _is_written(gone):  # by late ranks, between the two looks
                    gone.rename(partial)
    for gone in _unfinished(run_folder, DELETED):
        shutil.rmtree(gone, ignore_errors=True)
    name_written(run_folder, say)
    return newest_complete(run_folder, lambda text: say(f"warning: {text}"))


def newest_complete(run_folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint whose files are all intact, or None.

    A damaged one is renamed, so that it does not count towards the checkpoints to keep, and is written again. One that
    cannot be read at present keeps its name: a later start may read it.
    """
    folder = run_folder / CHECKPOINTS_FOLDER
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; move it away, so that checkpoints have a place")
    for place in sorted(folder.glob("step-*")):
        if NAME.fullmatch(place.name) and not (place / MANIFEST).is_file():
            warn(f"checkpoint {place.name} has no {MANIFEST}, so it is incomplete; ignored")
    for checkpoint in checkpoints_in(run_folder):
        name = checkpoint.folder.name
        try:
            checkpoint.check()
            return checkpoint
        except DamagedError as error:
            warn(f"checkpoint {name} is damaged ({error}); left out")
            with contextlib.suppress(OSError):  # a read-only disk deletes nothing either
                checkpoint.folder.rename(folder / f"{name}.{secrets.token_hex(4)}{DAMAGED}")
        except CheckpointError as error:
            warn(f"checkpoint {name} cannot be used ({error}); left out")
    return None


def name_written(run_folder: Path, say: Callable[[str], None]) -> None:
    """Rename checkpoints that only lack their final name, and say so; delete those whose step has one already."""
    for partial in filter(_is_written, _unfinished(run_folder, PARTIAL)):
        try:
            step = read_kept(partial / RUN_STATE, RunState).step
            if any(one.step == step and _is_whole(one) for one in checkpoints_in(run_folder)):
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
    roles = [one for one in partial.iterdir() if one.is_dir()]
    return bool(roles) and all((role / ROLE_FILES).is_file() for role in roles)


def _is_whole(checkpoint: Checkpoint) -> bool:
    try:
        checkpoint.check()
    except CheckpointError:
        return False
    return True


def prune(run_folder: Path, keep: int, best_step: int | None) -> list[int]:
    """Delete checkpoints other than the newest `keep` and the best one; return the steps of the deleted ones."""
    deleted = [one for one in checkpoints_in(run_folder)[keep:] if one.step != best_step]
    for checkpoint in deleted:
        discard(checkpoint.folder)
    return [one.step for one in deleted]


def _unfinished(run_folder: Path, ending: str) -> list[Path]:
    found = (run_folder / CHECKPOINTS_FOLDER).glob(f".step-*{ending}")
    return sorted(one for one in found if one.is_dir())


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"
