"""Digests of files, used to detect damaged files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hybridengine.errors import CheckpointError

THREADS = 8
"""Number of files hashed concurrently: hashing releases the GIL."""


class FileDigest(NamedTuple):
    """Size and SHA-256 of a file."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> FileDigest:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
            return cls(os.fstat(opened.fileno()).st_size, digest)


def digests_of(folder: Path, files: Iterable[str]) -> dict[str, FileDigest]:
    """Return the digests of files beneath a folder, by relative path."""
    names = sorted(files)
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: FileDigest.of(folder / name), names), strict=True))


def settled_digests(folder: Path, files: Iterable[str]) -> dict[str, FileDigest]:
    """Return `digests_of` new files after flushing them and their names to disk."""
    names = list(files)
    settle(folder, names)
    return digests_of(folder, names)


def settle(folder: Path, files: Iterable[str] = ()) -> None:
    """Flush files of a folder, and its directory entries, to disk, so that they survive a crash of the machine."""
    for path in [*(folder / name for name in files), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class DamagedError(CheckpointError):
    """Files of a checkpoint are not as they were written."""


def check_files(folder: Path, expected: Mapping[str, FileDigest]) -> None:
    """Check the files beneath a folder: CheckpointError for a link, DamagedError for the first that differs."""
    for name, digest in sorted(expected.items()):
        file = folder / name
        if file.is_symlink():
            raise CheckpointError(f"{name} is a link; copy the file there instead")
        if not file.is_file():
            raise DamagedError(f"{name} is missing")
        if (size := file.stat().st_size) != digest.num_bytes:
            raise DamagedError(f"{name} has {size} bytes instead of {digest.num_bytes}")
    for name, found in digests_of(folder, expected).items():
        if found != expected[name]:
            raise DamagedError(
                f"{name} is damaged: its SHA-256 is {found.sha256[:12]}..., was {expected[name].sha256[:12]}..."
            )
