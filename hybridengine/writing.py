"""Uniform errors for a run's files that cannot be written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hybridengine.errors import OutputError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an `OSError` of writing to `path` into an `OutputError`.

    Raises:
        OutputError: `path` cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror or error}); make room, or mend the disk: what was written before"
            " is kept"
        ) from error
