"""Writing of a run's files to a disk that may be full."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hybridengine.errors import OutputError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Enclose writing to `path`.

    Raises:
        OutputError: the system refuses; says why, and what to do.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror or error}); make room, or mend the disk: what was written before"
            " is kept"
        ) from error
