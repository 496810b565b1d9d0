"""Temporary folders that name their owner, so that those of a killed process are found and removed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

NAME = re.compile(r"hybridengine-[a-z]+-(?P<machine>[0-9a-f]{8}\.\d+)-(?P<owner>\d+-\d+)-\w+")


def make_folder(kind: str) -> Path:
    """Make a temporary folder of this process, after removing those whose processes have ended.

    Args:
        kind: a word for its purpose.
    """
    remove_leftovers()
    return Path(tempfile.mkdtemp(prefix=f"hybridengine-{kind}-{_machine()}-{_owner(os.getpid())}-"))


@contextlib.contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Make a folder as `make_folder` does, and remove it at the end."""
    folder = make_folder(kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers() -> None:
    """Remove the folders of this user whose processes have ended; those of other machines and containers stay."""
    for folder in Path(tempfile.gettempdir()).glob("hybridengine-*"):
        with contextlib.suppress(OSError):
            name = NAME.fullmatch(folder.name)
            if name is None or name["machine"] != _machine() or folder.lstat().st_uid != os.getuid():
                continue
            if name["owner"] != _owner(int(name["owner"].split("-")[0])):
                shutil.rmtree(folder, ignore_errors=True)  # follows no link, and removes none


@functools.cache
def _machine() -> str:
    """Return a name of this boot and this container's process numbers: folders may be shared."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _owner(pid: int) -> str | None:
    """Return a process's number and when it started, since numbers come again; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{pid}-{fields[19]}"
