"""Folders of checkpoints: what is whole, what is left out and why, what is kept, and what must not be loaded."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridengine.checkpoints import making
from hybridengine.checkpoints.conversion import default_companions
from hybridengine.checkpoints.digests import FileDigest, settled_digests
from hybridengine.checkpoints.folders import (
    CHECKPOINTS_FOLDER,
    MANIFEST,
    Checkpoint,
    checkpoint_at,
    checkpoints_in,
    newest_complete,
)
from hybridengine.checkpoints.making import (
    begin_checkpoint,
    complete_checkpoint,
    end_role,
    prune,
    settle_checkpoints,
    write_run_state,
)
from hybridengine.checkpoints.run_lock import LOCK_FILE, run_lock
from hybridengine.checkpoints.tensors import METADATA_FILE, read_metadata
from hybridengine.drivers.saving import Progress
from hybridengine.errors import CheckpointError, ConfigError


def write(run: Path, step: int) -> Checkpoint:
    """A checkpoint with one file of a role."""
    return complete_checkpoint(written(run, step))


def written(run: Path, step: int) -> Path:
    """Its folder, as long as it has no name."""
    partial = begin_checkpoint(run, step, {"state": {"multiplier": 0.1}}, ["actor"])
    (partial / "actor" / "weights").write_bytes(bytes(range(256)) * step)
    end_role(partial / "actor", settled_digests(partial / "actor", ["weights"]))
    return partial


def test_a_checkpoint_is_invisible_until_it_is_complete(tmp_path: Path) -> None:
    partial = begin_checkpoint(tmp_path, 10, {"state": {}}, ["actor"])
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
    assert done.run_state()["step"] == 10
    assert not partial.exists()


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def resigned(folder: Path, state: str) -> None:
    """Another run.json, with its digest in the manifest."""
    (folder / "run.json").write_text(state)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["run.json"] = [len(state), hashlib.sha256(state.encode()).hexdigest()]
    (folder / MANIFEST).write_text(json.dumps(manifest))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit": (
        lambda folder: flip(folder / "actor" / "weights"),
        r"actor/weights is damaged: its SHA-256 is",
    ),
    "shorter": (
        lambda folder: os.truncate(folder / "actor" / "weights", 700),
        "has 700 bytes instead of 768",
    ),
    "gone": (lambda folder: (folder / "actor" / "weights").unlink(), "actor/weights is missing"),
    "more": (
        lambda folder: (folder / "extra.pt").write_text("x"),
        "extra.pt is there, and manifest.json does not",
    ),
    "state": (lambda folder: flip(folder / "run.json"), "run.json is damaged"),
    "manifest": (lambda folder: os.truncate(folder / MANIFEST, 30), "manifest.json cannot be read"),
    "format": (
        lambda folder: (folder / MANIFEST).write_text('{"format": 99}'),
        "format 99, this version reads 1",
    ),
    "no list": (
        lambda folder: (folder / MANIFEST).write_text('{"format": 1}'),
        "has no size and digest for each file",
    ),
    "outside": (
        lambda folder: (folder / MANIFEST).write_text(
            '{"format": 1, "files": {"run.json": [1, "a"], "../x": [1, "a"]}}'
        ),
        "lists ../x, which is not beneath",
    ),
    "odd list": (
        lambda folder: (folder / MANIFEST).write_text('{"format": 1, "files": {"run.json": 3}}'),
        "no size and digest for each file",
    ),
    "nested list": (
        lambda folder: (folder / MANIFEST).write_text('{"a":' * 100_000),
        "manifest.json cannot be read",
    ),
    "endless size": (
        lambda folder: (folder / MANIFEST).write_text(
            '{"format": 1, "files": {"run.json": [Infinity, "a"]}}'
        ),
        "no size and digest for each file",
    ),
    "long name": (
        lambda folder: (folder / MANIFEST).write_text(
            json.dumps({"format": 1, "files": {"run.json": [1, "a"], "x" * 5000: [1, "a"]}})
        ),
        "a file that manifest.json lists cannot be read|run.json has",
    ),
    "nested state": (lambda folder: resigned(folder, '{"a":' * 100_000), "run.json cannot be read"),
    "link": (
        lambda folder: (
            (folder / "actor" / "weights").rename(folder.parent / "w")
            and (folder / "actor" / "weights").symlink_to(folder.parent / "w")
        ),
        "actor/weights is a link",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_left_out_with_the_reason(name: str, tmp_path: Path) -> None:
    damage, reason = DAMAGES[name]
    older, newer = write(tmp_path, 2), write(tmp_path, 3)
    damage(newer.folder)
    with pytest.raises(CheckpointError, match=reason):
        newer.check()
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) == older
    assert len(warnings) == 1
    assert "step-00000003 is damaged" in warnings[0]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        write(tmp_path, step)
    assert prune(tmp_path, 2, best_step=3) == [4, 2, 1]
    assert [one.step for one in checkpoints_in(tmp_path)] == [6, 5, 3]
    assert prune(tmp_path, 2, best_step=None) == [3]
    begin_checkpoint(tmp_path, 9, {})
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
        lambda partial: write_run_state(partial, 6, {"roles": 5}),
        "is damaged (5/files.json is missing)",
    ),
    "it lacks a role": (
        lambda partial: write_run_state(partial, 6, {"roles": ["actor", "critic"]}),
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


def test_what_is_written_in_the_last_moment_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ranks of a node that was thought to be lost, after somebody has looked and before they are shut out."""
    partial = begin_checkpoint(tmp_path, 4, {}, ["actor"])
    shut_out = making._unnamed

    def late(folder: Path) -> Path:
        end_role(partial / "actor", {})
        return shut_out(folder)

    monkeypatch.setattr(making, "_unnamed", late)
    found = settle_checkpoints(tmp_path, print)
    assert found is not None and found.step == 4


def test_what_cannot_be_read_now_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, read = written(tmp_path, 4), Path.read_text
    for name in ("run.json", "files.json"):
        said: list[str] = []

        def fails(file: Path, name: str = name) -> str:
            if file.name == name:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(file)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_text", fails)
            assert settle_checkpoints(tmp_path, said.append) is None
        why = "[Errno 5] Input/output error"
        assert said == [
            f"warning: {partial} is written, but cannot have its name now ({why}); it stays as it is"
        ]
    assert settle_checkpoints(tmp_path, print) is not None


def test_a_whole_checkpoint_is_not_replaced_by_another_of_its_step(tmp_path: Path) -> None:
    named = write(tmp_path, 4)
    before = (named.folder / MANIFEST).stat().st_ino
    written(tmp_path, 4)
    assert settle_checkpoints(tmp_path, print) == named
    assert (named.folder / MANIFEST).stat().st_ino == before
    flip(named.folder / "actor" / "weights")
    written(tmp_path, 4)
    assert settle_checkpoints(tmp_path, print) == named
    assert (named.folder / MANIFEST).stat().st_ino != before


class CrashError(BaseException):
    """Stands for the end of the process, after which nothing more is done."""


def test_a_crash_while_a_checkpoint_gets_its_name_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment at which something has just come to the disk."""
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
    assert "is written, but cannot have its name now ([Errno 27] File too large)" in said[0]
    found = settle_checkpoints(tmp_path, print)
    assert found is not None and found.step == 4


def test_damaged_checkpoints_take_no_place(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        write(tmp_path, step)
    assert prune(tmp_path, 1, best_step=None, ignored={9, 12}) == [3]
    assert [one.step for one in checkpoints_in(tmp_path)] == [12, 9, 6]


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


@pytest.mark.parametrize("state", ['{"step": "abc"}', '{"step": null, "config": {}}'])
def test_a_state_that_says_no_step_is_refused(state: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 5)
    other = checkpoint.folder.rename(tmp_path / "start")
    (other / "run.json").write_text(state)
    with pytest.raises(CheckpointError, match="which is no number"):
        checkpoint_at(other)


def test_a_state_whose_configuration_is_none_is_refused(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 5)
    (checkpoint.folder / "run.json").write_text('{"step": 5, "config": "x"}')
    with pytest.raises(CheckpointError, match="has no configuration"):
        checkpoint.run_state()


@pytest.mark.parametrize(
    "state",
    [
        '"state": {"a": 1' + "0" * 400 + '}, "best": {"step": null, "value": null}',
        '"state": {}, "best": {"step": Infinity, "value": 1.0}',
        '"state": [1], "best": {"step": null, "value": null}',
        '"state": {}',
    ],
)
def test_a_state_with_odd_numbers_is_refused(state: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 5)
    resigned(checkpoint.folder, f'{{"step": 5, {state}}}')
    checkpoint.check()
    with pytest.raises(CheckpointError, match="does not say where its run was"):
        Progress.at(checkpoint, None)


@pytest.mark.parametrize("config", ['{"run": "x"}', '{"model": {"path": [1]}, "run": {"folder": 3}}', "{}"])
def test_companions_of_a_state_that_may_be_anybodys(config: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 5)
    resigned(checkpoint.folder, f'{{"step": 5, "config": {config}}}')
    assert default_companions(checkpoint) is None
    for place in ("model", "companions"):  # the better one comes last
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").touch()
        assert default_companions(checkpoint) == tmp_path / place


def test_a_file_system_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some mounts of Lustre and FUSE; the doctor says the same."""

    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    told: list[str] = []
    with run_lock(tmp_path, told.append):
        pass
    (text,) = told
    assert f"{tmp_path} is on a file system without locks (Function not implemented): see to it" in text


def test_a_run_on_a_full_disk_is_one_error(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).symlink_to("/dev/full")
    with (
        pytest.raises(ConfigError, match=r"cannot be written to \(.*\); make room there"),
        run_lock(tmp_path, print),
    ):
        pass


def test_a_checkpoint_that_is_written_again_replaces_the_damaged_one(tmp_path: Path) -> None:
    flip(write(tmp_path, 4).folder / "actor" / "weights")
    write(tmp_path, 4).check()


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no manifest.json; name a folder such as"):
        checkpoint_at(tmp_path)
    assert checkpoint_at(write(tmp_path, 5).folder).step == 5


def test_other_things_than_checkpoints_are_left_out(tmp_path: Path) -> None:
    """A file with the name of a step, and a whole checkpoint that was copied to the name of another one."""
    written = write(tmp_path, 3)
    shutil.copytree(written.folder, written.folder.with_name("step-00000005"))
    written.folder.with_name("step-00000009").touch()
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) == written
    assert warnings == [
        "checkpoint step-00000009 is a file; left out",
        "checkpoint step-00000005 is damaged (run.json says step 3: the folder has another one's name); left out",
    ]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / CHECKPOINTS_FOLDER).touch()
    with pytest.raises(CheckpointError, match="checkpoints is a file; move it away"):
        newest_complete(tmp_path / "other", warnings.append)


def test_one_process_at_a_time_carries_out_a_run(tmp_path: Path) -> None:
    with (
        run_lock(tmp_path, print),
        pytest.raises(ConfigError, match=rf"is being carried out by process {os.getpid()} on "),
        run_lock(tmp_path, print),
    ):
        pass
    with run_lock(tmp_path, print):
        pass


class Harmful:
    """Would write a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (open, (str(self.target), "w"))


@pytest.mark.parametrize("where", ["alone", "inside"])
def test_metadata_that_would_run_code_is_refused_before_it_does(where: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    target = tmp_path / "harm"
    harmful = Harmful(target)
    content = harmful if where == "alone" else Metadata({}, planner_data=harmful)
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"names \S*open, which no description of tensors needs"):
        read_metadata(tmp_path)
    assert not target.exists()


def test_metadata_with_other_things_than_tensors_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(Metadata({"state": BytesStorageMetadata()})))
    with pytest.raises(CheckpointError, match="has state, which is no tensor"):
        read_metadata(tmp_path)
    (tmp_path / METADATA_FILE).write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_metadata(tmp_path)
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="is a dict, no description"):
        read_metadata(tmp_path)
