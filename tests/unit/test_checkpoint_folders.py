"""Folders of checkpoints: which are complete, ignored (and why), kept, or must not be loaded."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridengine.checkpoints.conversion import default_companions
from hybridengine.checkpoints.digests import DamagedError
from hybridengine.checkpoints.folders import (
    CHECKPOINTS_FOLDER,
    MANIFEST,
    checkpoint_at,
)
from hybridengine.checkpoints.making import newest_complete
from hybridengine.checkpoints.run_lock import LOCK_FILE, run_lock
from hybridengine.checkpoints.tensors import METADATA_FILE, read_metadata
from hybridengine.errors import CheckpointError, ConfigError
from tests.unit.checkpoints import flip, write


def resigned(folder: Path, state: str) -> None:
    """Write another run.json, with its digest in the manifest."""
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
        "format: Input should be 1",
    ),
    "no list": (
        lambda folder: (folder / MANIFEST).write_text('{"format": 1}'),
        "files: Field required",
    ),
    "outside": (
        lambda folder: (folder / MANIFEST).write_text(
            '{"format": 1, "files": {"run.json": [1, "a"], "../x": [1, "a"]}}'
        ),
        "../x is not beneath",
    ),
    "odd list": (
        lambda folder: (folder / MANIFEST).write_text('{"format": 1, "files": {"run.json": 3}}'),
        "manifest.json cannot be read",
    ),
    "nested list": (
        lambda folder: (folder / MANIFEST).write_text('{"a":' * 100_000),
        "manifest.json cannot be read",
    ),
    "endless size": (
        lambda folder: (folder / MANIFEST).write_text(
            '{"format": 1, "files": {"run.json": [Infinity, "a"]}}'
        ),
        "Input should be a finite number",
    ),
    "long name": (
        lambda folder: (folder / MANIFEST).write_text(
            json.dumps({"format": 1, "files": {"run.json": [1, "a"], "x" * 5000: [1, "a"]}})
        ),
        "a file cannot be read|run.json has",
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
    with pytest.raises(CheckpointError, match=reason) as caught:
        newer.check()
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) == older
    assert len(warnings) == 1
    # Only a file that is missing or has other bytes proves damage; what cannot be used now keeps its name.
    proven = isinstance(caught.value, DamagedError)
    assert f"step-00000003 {'is damaged' if proven else 'cannot be used'} (" in warnings[0]
    assert newer.folder.exists() is not proven


@pytest.mark.parametrize("state", ['{"step": "abc"}', '{"step": null, "config": {}}'])
def test_a_state_that_says_no_step_is_refused(state: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 5)
    other = checkpoint.folder.rename(tmp_path / "start")
    (other / "run.json").write_text(state)
    with pytest.raises(CheckpointError, match="cannot be read \\(step: "):
        checkpoint_at(other)


def test_a_state_whose_configuration_is_none_is_refused(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 5)
    (checkpoint.folder / "run.json").write_text('{"step": 5, "config": "x"}')
    with pytest.raises(CheckpointError, match="cannot be read \\(config: "):
        checkpoint.run_state()


@pytest.mark.parametrize(
    "state",
    [
        '"state": {}, "best": {"step": Infinity, "value": 1.0}',
        '"state": [1]',
    ],
)
def test_a_state_with_odd_numbers_is_refused(state: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 5)
    resigned(checkpoint.folder, f'{{"step": 5, {state}}}')
    with pytest.raises(CheckpointError, match=r"run.json cannot be read \("):
        checkpoint.check()


def test_the_companions_are_those_of_the_run(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 5)
    assert default_companions(checkpoint) is None
    (tmp_path / "companions").mkdir()
    (tmp_path / "companions" / "config.json").touch()
    assert default_companions(checkpoint) == tmp_path / "companions"


def test_a_file_system_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some mounts of Lustre and FUSE have no locks; the doctor reports the same."""

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
    """A file with the name of a step, and a complete checkpoint that was copied to the name of another one."""
    written = write(tmp_path, 3)
    shutil.copytree(written.folder, written.folder.with_name("step-00000005"))
    written.folder.with_name("step-00000009").touch()
    warnings: list[str] = []
    assert newest_complete(tmp_path, warnings.append) == written
    assert warnings == [
        "checkpoint step-00000009 has no manifest.json, so it is incomplete; ignored",
        "checkpoint step-00000005 cannot be used (run.json says step 3: the folder has another one's name); left out",
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
    """An object that would write a file when it is unpickled."""

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
    with pytest.raises(CheckpointError, match="has state, which is not a tensor"):
        read_metadata(tmp_path)
    (tmp_path / METADATA_FILE).write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_metadata(tmp_path)
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_metadata(tmp_path)
