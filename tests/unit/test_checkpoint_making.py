"""Naming and removal of checkpoints: no crash, disk or slow rank costs a checkpoint that is written."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridengine.checkpoints import folders, making
from hybridengine.checkpoints.digests import FileDigest
from hybridengine.checkpoints.folders import (
    CHECKPOINTS_FOLDER,
    MANIFEST,
    Checkpoint,
    RunState,
    checkpoints_in,
    write_kept,
)
from hybridengine.checkpoints.making import (
    begin_checkpoint,
    complete_checkpoint,
    end_role,
    newest_complete,
    prune,
    settle_checkpoints,
)
from tests.unit.checkpoints import flip, write, written


def test_a_checkpoint_is_invisible_until_it_is_complete(tmp_path: Path) -> None:
    partial = begin_checkpoint(tmp_path, RunState(step=10, roles=("actor",)))
    (partial / "actor" / "weights").write_bytes(b"1234")
    assert checkpoints_in(tmp_path) == []
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) is None
    assert warnings == []
    known = {
        "weights": FileDigest(4, "03ac674216f3e15c761ee1a5e255f067953623c8b388b4459e13f978d7c846f4")
    }  # sha256sum
    end_role(partial / "actor", known)
    done = complete_checkpoint(partial)
    assert checkpoints_in(tmp_path) == [done]
    done.check()
    assert done.run_state().step == 10
    assert not partial.exists()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        write(tmp_path, step)
    assert prune(tmp_path, 2, best_step=3) == [4, 2, 1]
    assert [one.step for one in checkpoints_in(tmp_path)] == [6, 5, 3]
    assert prune(tmp_path, 2, best_step=None) == [3]
    begin_checkpoint(tmp_path, RunState(step=9))
    assert settle_checkpoints(tmp_path, print) == checkpoints_in(tmp_path)[0]
    assert sorted(one.name for one in (tmp_path / CHECKPOINTS_FOLDER).iterdir()) == [
        "step-00000005",
        "step-00000006",
    ]


NO_CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "a role is being written": (
        lambda partial: (partial / "critic").mkdir(),
        "is incomplete (its run, or its",
    ),
    "it was just begun": (lambda partial: shutil.rmtree(partial / "actor"), "is incomplete (its run, or its"),
    "it says nothing of its run": (
        lambda partial: (partial / "run.json").write_text("{"),
        "is damaged (run.json cannot be read",
    ),
    "it says other things": (
        lambda partial: (partial / "run.json").write_text('{"step": 6, "roles": 5}'),
        "is damaged (run.json cannot be read (roles: ",
    ),
    "it lacks a role": (
        lambda partial: write_kept(partial / "run.json", RunState(step=6, roles=("actor", "critic"))),
        "is damaged (critic/files.json is missing)",
    ),
    "it lacks a file": (
        lambda partial: (partial / "actor" / "weights").unlink(),
        "is damaged (actor/weights is not as it was written)",
    ),
    "it was being deleted": (lambda partial: partial.rename(partial.with_suffix(".deleted")), None),
}


@pytest.mark.parametrize("why", NO_CHECKPOINTS)
def test_what_lacks_only_its_name_gets_it_and_nothing_else_does(why: str, tmp_path: Path) -> None:
    older, lacks_its_name, lacks_more = write(tmp_path, 2), written(tmp_path, 4), written(tmp_path, 6)
    change, warning = NO_CHECKPOINTS[why]
    change(lacks_more)
    stray = lacks_more.with_name(".step-00000007-00.partial")
    stray.touch()
    said: list[str] = []
    found = settle_checkpoints(tmp_path, said.append)
    assert found is not None
    assert found == Checkpoint(lacks_its_name.with_name("step-00000004"), 4)
    found.check()
    warnings = [text for text in said if text.startswith("warning: ")]
    named = [text for text in said if text not in warnings]
    assert [text.split(" was written, but its run, or its")[0] for text in named] == ["step-00000004"]
    assert [f"checkpoint {lacks_more.name} {warning}" in text for text in warnings] == [True] * bool(warning)
    assert sorted(older.folder.parent.iterdir()) == [stray, older.folder, found.folder]


def test_what_cannot_be_read_now_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, read = written(tmp_path, 4), Path.read_bytes
    for name in ("run.json", "files.json"):
        said: list[str] = []

        def fails(file: Path, name: str = name) -> bytes:
            if file.name == name:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(file)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", fails)
            assert settle_checkpoints(tmp_path, said.append) is None
        why = "[Errno 5] Input/output error"
        assert said == [
            f"warning: checkpoint {partial} was written but could not be renamed: {why}; it will be renamed at the next"
            " save"
        ]
    assert settle_checkpoints(tmp_path, print) is not None


def test_a_whole_checkpoint_is_not_replaced_by_another_of_its_step(tmp_path: Path) -> None:
    named = write(tmp_path, 4)
    before = (named.folder / MANIFEST).stat().st_ino
    written(tmp_path, 4)
    assert settle_checkpoints(tmp_path, print) == named
    assert (named.folder / MANIFEST).stat().st_ino == before
    flip(named.folder / "actor" / "weights")
    assert settle_checkpoints(tmp_path, print) is None
    written(tmp_path, 4)
    assert settle_checkpoints(tmp_path, print) == named
    assert (named.folder / MANIFEST).stat().st_ino != before


class CrashError(BaseException):
    """Simulates the end of the process, after which nothing more is done."""


def test_a_crash_while_a_checkpoint_gets_its_name_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash occurs at every moment at which something has just been written to the disk."""
    sync, moments = os.fsync, iter(range(100))
    for crash_at in moments:
        run = tmp_path / str(crash_at)
        left = iter(range(crash_at))

        def crashes(descriptor: int, left: Iterator[int] = left) -> None:
            sync(descriptor)
            if next(left, None) is None:
                raise CrashError

        partial = written(run, 4)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", crashes)
            try:
                complete_checkpoint(partial)
                break
            except CrashError:
                pass
        found = settle_checkpoints(run, print)
        assert found is not None
        found.check()
    assert crash_at > 6


def test_a_disk_that_takes_no_name_loses_nothing(tmp_path: Path) -> None:
    older, _ = write(tmp_path, 2), written(tmp_path, 4)
    limits, said = resource.getrlimit(resource.RLIMIT_FSIZE), list[str]()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        assert settle_checkpoints(tmp_path, said.append) == older
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "was written but could not be renamed: [Errno 27] File too large" in said[0]
    found = settle_checkpoints(tmp_path, print)
    assert found is not None and found.step == 4


def test_damaged_checkpoints_take_no_place(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        newest = write(tmp_path, step)
    flip(newest.folder / "actor" / "weights")
    assert newest_complete(tmp_path, print) == checkpoints_in(tmp_path)[0]
    assert prune(tmp_path, 1, best_step=None) == [6, 3]
    assert [one.step for one in checkpoints_in(tmp_path)] == [9]
    (damaged,) = newest.folder.parent.glob("*.damaged")
    assert (damaged / "actor" / "weights").is_file()


def test_files_of_a_late_rank_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank completes the checkpoint between the look at it and its renaming."""
    partial = begin_checkpoint(tmp_path, RunState(step=4, roles=("actor",)))
    renamed = making._renamed

    def late(folder: Path) -> Path:
        end_role(partial / "actor", {})
        return renamed(folder)

    monkeypatch.setattr(making, "_renamed", late)
    found = settle_checkpoints(tmp_path, print)
    assert found is not None and found.step == 4


def test_a_checkpoint_that_cannot_be_read_at_present_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = write(tmp_path, 3), write(tmp_path, 6)
    said = list[str]()

    def unreadable(folder: Path, expected: object) -> None:
        if folder == newer.folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(folders, "check_files", unreadable)
        assert newest_complete(tmp_path, said.append) == older
    assert len(said) == 1 and "step-00000006 cannot be used (a file cannot be read (" in said[0]
    assert newest_complete(tmp_path, said.append) == newer


def test_a_folder_without_a_manifest_is_reported(tmp_path: Path) -> None:
    older, newer = write(tmp_path, 3), write(tmp_path, 6)
    (newer.folder / "manifest.json").unlink()
    said = list[str]()
    assert newest_complete(tmp_path, said.append) == older
    assert said == ["checkpoint step-00000006 has no manifest.json, so it is incomplete; ignored"]


def test_every_file_is_on_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = set[str](), os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}").partition(".partial")[2].strip("/"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    checkpoint = write(tmp_path, 5)
    found = {str(one.relative_to(checkpoint.folder)) for one in checkpoint.folder.rglob("*")}
    assert found == {"actor", "actor/weights", "actor/files.json", "run.json", MANIFEST}
    assert found <= synced
