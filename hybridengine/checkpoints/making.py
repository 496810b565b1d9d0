"""How a checkpoint comes to its name and loses it: begun, written by ranks, named, pruned; and what a crash leaves."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridengine.checkpoints.digests import FileDigest, digests_json, settled_digests, sync
from hybridengine.checkpoints.folders import (
    CHECKPOINTS_FOLDER,
    FORMAT,
    MANIFEST,
    ROLE_FILES,
    RUN_STATE,
    Checkpoint,
    checkpoints_in,
    files_beneath,
    listed_files,
    newest_complete,
    parsed_json,
)
from hybridengine.errors import CheckpointError

PARTIAL, DELETED = ".partial", ".deleted"
"""How the names of folders end that are no checkpoints yet, or no longer."""


def begin_checkpoint(
    run_folder: Path, step: int, run_state: Mapping[str, Any], roles: Iterable[str] = ()
) -> Path:
    """A folder to write a checkpoint into, with one for each role, beside the complete ones and under another name.

    No attempt has the name of another: ranks of a node that was thought to be lost may still be writing.

    Raises:
        OSError: it cannot be made.
    """
    name = f".{_folder_name(step)}-{secrets.token_hex(4)}{PARTIAL}"
    partial, roles = run_folder / CHECKPOINTS_FOLDER / name, list(roles)
    try:
        partial.mkdir(parents=True)
        for role in roles:
            (partial / role).mkdir()
        write_run_state(partial, step, {"roles": roles, **run_state})
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial


def write_run_state(partial: Path, step: int, run_state: Mapping[str, Any]) -> None:
    """What a checkpoint says of its run, beside the roles.

    Raises:
        OSError: it cannot be written.
    """
    _write_json(partial / RUN_STATE, {"format": FORMAT, "step": step, **run_state})


def end_role(folder: Path, digests: Mapping[str, FileDigest]) -> None:
    """Say that all ranks have written a role, and which files; from now on it is whole.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = folder / f".{ROLE_FILES}"
    _write_json(unfinished, {"files": digests_json(digests)})
    unfinished.rename(folder / ROLE_FILES)
    sync(folder)


def complete_checkpoint(partial: Path, named: Path | None = None) -> Checkpoint:
    """Write the manifest of a folder that has everything else, and give it its name.

    Args:
        named: that name; the one of its step where left out.

    Raises:
        CheckpointError: it lacks something.
        OSError: writing failed; the folder keeps its temporary name.
    """
    state = parsed_json(partial / RUN_STATE)
    step = _step_in(state)
    roles = state.get("roles", [])
    for role in roles if isinstance(roles, list) else [roles]:
        if not (partial / str(role) / ROLE_FILES).is_file():
            raise CheckpointError(f"{role}/{ROLE_FILES} is missing")
    known = dict[str, FileDigest]()
    for file in partial.glob(f"*/{ROLE_FILES}"):
        role = file.parent.name
        known |= {
            f"{role}/{name}": digest for name, digest in listed_files(parsed_json(file), ROLE_FILES).items()
        }
    for name, digest in known.items():
        if not (partial / name).is_file() or (partial / name).stat().st_size != digest.num_bytes:
            raise CheckpointError(f"{name} is not as it was written")
    others = [name for name in files_beneath(partial) if name not in known and name != MANIFEST]
    known |= settled_digests(partial, others)
    _write_json(partial / MANIFEST, {"format": FORMAT, "files": digests_json(known)})
    for folder in [*(one for one in partial.rglob("*") if one.is_dir()), partial]:
        sync(folder)
    named = named or partial.parent / _folder_name(step)
    if named.exists():  # of an attempt that was damaged later
        discard(named)
    partial.rename(named)
    with contextlib.suppress(OSError):  # whoever finds it without its name gives it once more
        sync(named.parent)
    return Checkpoint(named, step)


def discard(folder: Path) -> None:
    """Delete what is no checkpoint, or no longer.

    First its name goes: what is half deleted is never taken for a whole one, and late ranks write no more into it. What
    cannot lose its name stays.
    """
    with contextlib.suppress(OSError):
        shutil.rmtree(_unnamed(folder), ignore_errors=True)


def _unnamed(folder: Path) -> Path:
    """The folder under a name that nobody looks for or writes to."""
    gone = folder.with_name(f".{folder.name.removesuffix(PARTIAL).lstrip('.')}{DELETED}")
    shutil.rmtree(gone, ignore_errors=True)
    return folder.rename(gone)


def settle_checkpoints(run_folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that a run goes on from, None where there is none; what was never completed is deleted.

    Those that only lack their name get it: all ranks had written them when their run, or its ranks, ended.

    Args:
        say: told of those, and of each one that is left out, and why.

    Raises:
        CheckpointError: there is a file where the folder of checkpoints should be.
    """
    for partial in _unfinished(run_folder, PARTIAL):
        if _is_written(partial):
            continue
        say(
            f"warning: checkpoint {partial.name} is incomplete (its run, or its ranks, ended while it was written); left"
            " out"
        )
        with contextlib.suppress(OSError):  # of a disk that lets nothing go: then it stays
            gone = _unnamed(partial)
            if _is_written(gone):  # by ranks that were late, until just now
                gone.rename(partial)
    for gone in _unfinished(run_folder, DELETED):
        shutil.rmtree(gone, ignore_errors=True)
    name_written(run_folder, say)
    return newest_complete(run_folder, lambda text: say(f"warning: {text}"))


def name_written(run_folder: Path, say: Callable[[str], None]) -> None:
    """Give their names to checkpoints that lack nothing else; those of whose step there is a whole one are deleted.

    Args:
        say: told of each, and of each one that cannot have it, which stays as it is.
    """
    for partial in _unfinished(run_folder, PARTIAL):
        if not _is_written(partial):
            continue
        try:
            step = _step_in(parsed_json(partial / RUN_STATE))
            if any(one.step == step and _is_whole(one) for one in checkpoints_in(run_folder)):
                discard(partial)
                continue
            named = complete_checkpoint(partial).folder.name
        except CheckpointError as error:
            say(f"warning: checkpoint {partial.name} is damaged ({error}); left out")
            discard(partial)
        except OSError as error:
            say(f"warning: {partial} is written, but cannot have its name now ({error}); it stays as it is")
        else:
            say(
                f"{named} was written, but its run, or its ranks, ended before it had its name; it has it now"
            )


def _is_written(partial: Path) -> bool:
    """Whether all ranks have written all roles."""
    roles = [one for one in partial.iterdir() if one.is_dir()]
    return bool(roles) and all((role / ROLE_FILES).is_file() for role in roles)


def _is_whole(checkpoint: Checkpoint) -> bool:
    try:
        checkpoint.check()
    except CheckpointError:
        return False
    return True


def _step_in(run_state: Mapping[str, Any]) -> int:
    """What run.json says.

    Raises:
        CheckpointError: nothing.
    """
    step = run_state.get("step")
    if not isinstance(step, int):
        raise CheckpointError(f"{RUN_STATE} says no step")
    return step


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
            discard(checkpoint.folder)
            deleted.append(checkpoint.step)
    return deleted


def _unfinished(run_folder: Path, *endings: str) -> list[Path]:
    """Folders of checkpoints that have no name, or no longer one."""
    folder = run_folder / CHECKPOINTS_FOLDER
    return sorted(one for ending in endings for one in folder.glob(f".step-*{ending}") if one.is_dir())


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    with file.open("w") as opened:
        json.dump(value, opened, indent=1)
        opened.write("\n")
        opened.flush()
        os.fsync(opened.fileno())
