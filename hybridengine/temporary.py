"""Temporary folders named after their process, so that the folders of killed processes can be removed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

NAME = re.compile(r"hybridengine-[a-z]+-(?P<machine>[0-9a-f]{8}\.\d+)-(?P<owner>\d+-\d+)-\w+")

SHORT, OWNER_FILE = "he-", "owner"
REMOVE = 'rm -rf -- "$1" || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; }'
"""Shell commands that remove a folder."""
REMOVAL_S = 5.0
"""Time limit for waiting until a folder is removed."""
MAX_SOCKET_PATH = 107
"""Largest number of bytes in the path of a Unix socket (unix(7))."""


def make_folder(kind: str) -> Path:
    """Create a temporary folder whose name has `kind`, a word, after removing those of processes that have ended."""
    remove_leftovers()
    return Path(tempfile.mkdtemp(prefix=f"hybridengine-{kind}-{_machine()}-{_owner(os.getpid())}-"))


def make_short_folder(kind: str, room: int) -> Path:
    """Create a temporary folder to which paths of `room` bytes can be added for Unix sockets; as `make_folder` otherwise.

    It is in /tmp if the path of the folder for temporary files is too long, and is named he-KIND-*; a file in it names
    its process.
    """
    remove_leftovers()
    longest = MAX_SOCKET_PATH - room - len(f"/{SHORT}{kind}-12345678")
    place = tempfile.gettempdir()
    folder = Path(
        tempfile.mkdtemp(
            prefix=f"{SHORT}{kind}-", dir=place if len(os.fsencode(place)) <= longest else "/tmp"
        )
    )
    (folder / OWNER_FILE).write_text(f"{_machine()} {_owner(os.getpid())}")
    return folder


@contextlib.contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Yield a folder from `make_folder`, and remove it on exit."""
    folder = make_folder(kind)
    try:
        yield folder
    finally:
        remove_tree(folder)


def remove_leftovers() -> None:
    """Remove this user's folders whose processes have ended; keep those of other machines and containers."""
    for folder in Path(tempfile.gettempdir()).glob("hybridengine-*"):
        with contextlib.suppress(OSError):
            name = NAME.fullmatch(folder.name)
            if name is None or name["machine"] != _machine() or folder.lstat().st_uid != os.getuid():
                continue
            if name["owner"] != _owner(int(name["owner"].split("-")[0])):
                remove_tree(folder)
    for place in {tempfile.gettempdir(), "/tmp"}:
        for file in Path(place).glob(f"{SHORT}*/{OWNER_FILE}"):
            with contextlib.suppress(OSError, ValueError):
                if not file.is_file() or file.lstat().st_uid != os.getuid():
                    continue
                machine, owner = file.read_text().split()
                if machine == _machine() and owner != _owner(int(owner.split("-")[0])):
                    remove_tree(file.parent)


def remove_tree(folder: str | Path) -> None:
    """Remove a folder with what programs have left in it; after REMOVAL_S, the removal continues in the background."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        start_removal(folder).wait(REMOVAL_S)


def start_removal(folder: str | Path) -> subprocess.Popen[bytes]:
    """Start to remove a folder in a process, as far as this user may; links are not followed.

    Folders may be nested deeper than Python's recursion, be too many to wait for, or forbid their owner to change them.
    """
    return subprocess.Popen(
        ["sh", "-c", REMOVE, "sh", folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@functools.cache
def _machine() -> str:
    """Return an identifier of this boot and PID namespace, since several machines may share the folder."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _owner(pid: int) -> str | None:
    """Return the PID and start time of a process, because PIDs are reused; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{pid}-{fields[19]}"
