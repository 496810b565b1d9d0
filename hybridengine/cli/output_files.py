"""Files that a command writes: checked before it computes anything, and written with errors that name the option."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

from hybridengine.errors import ConfigError, raise_all

PICTURE_FORMS = (".png", ".svg", ".pdf")


def check_output_files(files: Mapping[str, Path | None], sources: Mapping[str, str | None]) -> None:
    """Check that every file that an option names can be written, and is another one; nothing is left behind.

    Args:
        files: option, such as "--json" -> file; None where the option is not given.
        sources: option -> file or folder that the command reads; a name that is neither is none.

    Raises:
        ConfigError: a folder that is missing or read-only, a name that is a folder or a pipe, one file for two options,
            one that is read as well, or for --json one that holds something else: `--json CONFIG` is easily written.
    """
    given = {option: file for option, file in files.items() if file is not None}
    raise_all(
        _message(option, file, error)
        for option, file in given.items()
        if (error := _write_error(file)) is not None
    )
    raise_all(
        f"{one} {given[one]} and {other} {given[other]} are the same file; name two"
        for one, other in combinations(given, 2)
        if _is_same(given[one], given[other])
    )
    raise_all(
        f"{option} {file} is what {source} reads; name another file"
        for option, file in given.items()
        for source, name in sources.items()
        if name is not None and any(_is_same(file, Path(name) / part) for part in ("", "config.json"))
    )
    raise_all(
        f"{option} {file} is there, and holds no JSON; name another one, so that nothing is lost"
        for option, file in given.items()
        if option == "--json" and _holds_something_else(file)
    )


@contextlib.contextmanager
def output(option: str, file: Path) -> Iterator[Path]:
    """Context for writing `file`, which `option` names: yields the path to write to, which becomes `file` at the end.

    Where writing fails, `file` is as it was before; but a device, a stream of this process, or a file in a folder that
    takes no other is written in place.

    Raises:
        ConfigError: writing failed, e.g. for lack of space.
    """
    place = file.resolve()  # of a link, what it leads to
    new = place.with_name(f".hybridengine-{os.getpid()}{place.suffix}")
    is_special = (file.exists() and not file.is_file()) or is_stream(file)
    if is_special or not os.access(place.parent, os.W_OK):
        new = file
    try:
        yield new
        if new != file:
            _put(new, place)
    except OSError as error:
        raise ConfigError(_message(option, file, error)) from error
    finally:
        if new != file:
            with contextlib.suppress(OSError):
                new.unlink()


def is_stream(file: Path) -> bool:
    """Whether `file` is where stdout or stderr go, or a device: what is written there must replace nothing."""
    if file.absolute().parts[1:2] in (("dev",), ("proc",)):
        return True
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(file.stat(), os.fstat(descriptor)):
                return True
    return False


def _put(new: Path, place: Path) -> None:
    """Make a complete file the one at `place`."""
    if place.exists():
        shutil.copymode(place, new)
    try:
        new.replace(place)
    except OSError:  # a file that is mounted by itself cannot be replaced
        shutil.copyfile(new, place)


def write_output(option: str, file: Path, text: str) -> None:
    """Write `text` into `file`, which `option` names; where that fails, the file is as it was before.

    Raises:
        ConfigError: writing failed, e.g. for lack of space.
    """
    with output(option, file) as place, place.open("a" if is_stream(file) else "w") as stream:
        stream.write(text)


def write_outputs(files: Mapping[str, tuple[Path | None, str | Callable[[Path], None]]]) -> None:
    """Write files; one that fails does not keep the others from being written.

    Args:
        files: option -> the file that it names, None where it is not given, and a text or what writes into a path.

    Raises:
        ConfigError: all that failed, in one list.
    """
    problems = list[str]()
    for option, (file, content) in files.items():
        if file is None:
            continue
        try:
            if isinstance(content, str):
                write_output(option, file, content)
            else:
                with output(option, file) as place:
                    content(place)
        except ConfigError as error:
            problems.append(str(error))
    raise_all(problems)


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


def _message(option: str, file: Path, error: OSError) -> str:
    return (
        f"{option} {file} cannot be written ({error.strerror or error});"
        " name a file in a folder that exists, can be written to and has space"
    )


def _write_error(file: Path) -> OSError | None:
    try:
        place = file.resolve()
    except RuntimeError:  # of pathlib, for links that lead to themselves
        return OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    try:
        if place.is_fifo():  # who waits for a reader may wait for ever; one of a shell, /dev/fd/63, has one
            return OSError("it is a pipe")
        existed = file.exists()
        with file.open("ab"):
            pass
    except OSError as error:
        return error
    if not existed:
        with contextlib.suppress(OSError):
            file.resolve().unlink()  # of a link to nowhere, what it led to; the link stays
    return None


def _holds_something_else(file: Path) -> bool:
    """Whether there is a file that figures were never written to."""
    if not file.is_file() or is_stream(file) or not file.stat().st_size:
        return False
    with file.open("rb") as opened:  # figures may be many, and half written
        return not opened.read(64).lstrip().startswith((b"{", b"["))


def _is_same(one: Path, other: Path) -> bool:
    """Whether both name one file, by whatever spelling or link."""
    same = one.resolve() == other.resolve()
    return same or (one.exists() and other.exists() and one.samefile(other))
