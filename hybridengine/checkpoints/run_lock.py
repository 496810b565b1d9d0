"""A lock on the folder of a run, so that only one process at a time executes the run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from hybridengine.errors import ConfigError
from hybridengine.files import NO_LOCKS

LOCK_FILE = "run.lock"


@contextlib.contextmanager
def run_lock(run_folder: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Prevent other processes, on every machine that sees the folder, from executing the run; warn where this fails.

    Raises ConfigError if another process holds the lock, or the folder is not writable.
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


def is_locked(file: Path) -> bool:
    """Return True if a process holds the lock of a run's folder, whose file is given; False if this cannot be known."""
    try:
        # NFS refuses an exclusive lock of a file that is open for reading alone.
        with file.open("r+b") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
