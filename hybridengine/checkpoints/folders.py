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
MANIFEST, RUN_STATE, ROLE_FILES = "manifest.json", "run.json", "files.json"
LOCK_FILE = "run.lock"
NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
"""What file systems say that know no locks."""
PARTIAL, DELETED = ".partial", ".deleted"
"""How the names of folders end that are no checkpoints yet, or no longer."""
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
        expected = _listed(manifest, MANIFEST)
        if RUN_STATE not in expected:
            raise CheckpointError(f"{MANIFEST} does not list {RUN_STATE}")
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

    def num_bytes(self) -> int:
        """Of all files that the manifest lists.

        Raises:
            CheckpointError: it cannot be read.
        """
        return sum(one.num_bytes for one in _listed(_json_of(self.folder / MANIFEST), MANIFEST).values())

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
    state = _parsed(partial / RUN_STATE)
    step = _step_in(state)
    roles = state.get("roles", [])
    for role in roles if isinstance(roles, list) else [roles]:
        if not (partial / str(role) / ROLE_FILES).is_file():
            raise CheckpointError(f"{role}/{ROLE_FILES} is missing")
    known = dict[str, FileDigest]()
    for file in partial.glob(f"*/{ROLE_FILES}"):
        role = file.parent.name
        known |= {f"{role}/{name}": digest for name, digest in _listed(_parsed(file), ROLE_FILES).items()}
    for name, digest in known.items():
        if not (partial / name).is_file() or (partial / name).stat().st_size != digest.num_bytes:
            raise CheckpointError(f"{name} is not as it was written")
    others = [name for name in _files_beneath(partial) if name not in known and name != MANIFEST]
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
            step = _step_in(_parsed(partial / RUN_STATE))
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


def _files_beneath(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if not one.is_dir())


def _listed(found: Mapping[str, Any], where: str) -> dict[str, FileDigest]:
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
        return _parsed(file)
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read ({error})") from None


def _parsed(file: Path) -> dict[str, Any]:
    """As `_json_of`.

    Raises:
        CheckpointError: it says nothing.
        OSError: it cannot be read, now.
    """
    try:
        found = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
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
