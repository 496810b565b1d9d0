"""Files that a command will write, checked before it computes anything."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from hybridengine.errors import ConfigError, raise_all

PICTURE_FORMS = (".png", ".svg", ".pdf")


def check_output_files(files: Mapping[str, Path | None]) -> None:
    """Check that every file that an option names can be written; nothing is left behind.

    Args:
        files: option, such as "--json" -> file; None where the option is not given.

    Raises:
        ConfigError: a folder that is missing or read-only, or a name that is a folder.
    """
    raise_all(
        f"{option} {file} cannot be written ({error.strerror}); name a file in a folder that exists and can be written to"
        for option, file in files.items()
        if file is not None and (error := _write_error(file)) is not None
    )


def check_picture(option: str, file: Path | None) -> None:
    """Check that a picture can be drawn into `file`, where one is asked for.

    Raises:
        ConfigError: an unknown form of pictures, or no matplotlib.
    """
    if file is None:
        return
    if file.suffix.lower() not in PICTURE_FORMS:
        raise ConfigError(f"{option} {file} must end in one of {', '.join(PICTURE_FORMS)}; rename it")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs matplotlib; install hybridengine[plots]")


def _write_error(file: Path) -> OSError | None:
    existed = file.exists()
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        return error
    if not existed:
        with contextlib.suppress(OSError):
            file.unlink()
    return None
