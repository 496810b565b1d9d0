"""Temporary folders: those of killed processes are removed by the next process, and no others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hybridengine import temporary

ROOT = Path(__file__).parents[2]


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = temporary.make_folder("reward")
    code = "from hybridengine.temporary import make_folder; print(make_folder('bench'), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}, cwd=ROOT,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        (left / "file").touch()
        strangers = [
            left.with_name(left.name.replace(f"-{child.pid}-", f"-{child.pid}-9")),  # an earlier process
            left.with_name(left.name.replace("bench-", "bench-0")),  # not a name of this project
            left.with_name("hybridengine-anything"),
        ]
        for folder in strangers:
            folder.mkdir()
        temporary.remove_leftovers()
        assert (left / "file").exists() and own.exists()
        assert [folder.exists() for folder in strangers] == [False, True, True]
        child.kill()
    with temporary.temporary_folder("calibrate") as last:
        assert sorted(tmp_path.iterdir()) == sorted([own, last, *strangers[1:]])
    assert not last.exists()


DEEP = "import os; place = '{}'\nfor _ in range(3000): os.mkdir(place); os.chdir(place); place = 'a'"


def test_what_a_killed_process_left_may_be_deeper_than_recursion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = f"{temporary._machine()}-{os.getpid()}-1"
    left = tmp_path / f"hybridengine-episodes-{owner}-abc"
    subprocess.run([sys.executable, "-c", DEEP.format(left)], check=True)
    try:
        temporary.remove_leftovers()
        assert not any(tmp_path.iterdir())
    finally:  # pytest could not remove it either
        subprocess.run(["rm", "-rf", left], check=True)


def test_what_others_have_named_so_is_neither_read_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = [tmp_path / f"he-{name}" for name in ("fifo", "zero", "other")]
    for folder in folders:
        folder.mkdir()
    os.mkfifo(folders[0] / "owner")  # reading it would wait for a writer forever
    (folders[1] / "owner").symlink_to("/dev/zero")
    (folders[2] / "owner").write_text(f"{temporary._machine()} {os.getpid()}-1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        temporary.remove_leftovers()
    assert all(folder.exists() for folder in folders)
    temporary.remove_leftovers()
    assert [folder.exists() for folder in folders] == [True, True, False]


def test_a_folder_for_sockets_is_short_and_goes_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path.joinpath(*["folder"] * 12)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    own = temporary.make_short_folder("test", 60)
    try:
        assert own.parent == Path("/tmp") and len(str(own)) + 60 <= 107
        assert own.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(own)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    room = 107 - len(f"{tmp_path}/he-test-12345678")
    code = f"from hybridengine.temporary import make_short_folder as make; print(make('test', {room}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}, cwd=ROOT, check=False,
    )  # fmt: skip
    left = Path(done.stdout.strip())
    assert left.parent == tmp_path and left.exists()
    own = temporary.make_short_folder("test", room)
    assert own.exists() and not left.exists()


def test_what_takes_long_to_remove_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, go = tmp_path / "folder", tmp_path / "go"
    folder.mkdir()
    monkeypatch.setattr(temporary, "REMOVAL_S", 0.1)
    monkeypatch.setattr(temporary, "REMOVE", f"until [ -e {go} ]; do sleep 0.05; done; {temporary.REMOVE}")
    temporary.remove_tree(folder)
    assert folder.exists()
    go.touch()
    deadline = time.monotonic() + 60
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may act as another user")
def test_folders_that_forbid_their_owner_to_change_them_are_removed() -> None:
    """Root needs no permission; Go's cache of modules has such folders."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    (folder / "closed").mkdir()
    (folder / "closed" / "file").touch()
    (folder / "closed").chmod(0o500)
    for path in (folder, folder / "closed", folder / "closed" / "file"):
        os.chown(path, 65534, 65534)
    subprocess.run(["sh", "-c", temporary.REMOVE, "sh", folder], user=65534, check=False, capture_output=True)
    assert not folder.exists()
