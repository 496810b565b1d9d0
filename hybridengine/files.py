"""Files that users supply and that runs write; errors of reading give value and rule, and the caller adds the remedy."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hybridengine.errors import OutputError, UnreadableError

T = TypeVar("T")
NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
"""Errors of flock(2) on file systems without support for locks."""


def check_regular(path: str | Path) -> None:
    """Check that `path` is a regular file, as a pipe might block; FileNotFoundError or UnreadableError if it is not."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise _refused(path, error) from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise UnreadableError(f"{path} is {kind}, not a regular file")


def read_text(path: str | Path) -> str:
    """Return the UTF-8 text of a regular file; raise FileNotFoundError or UnreadableError if there is none."""
    check_regular(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path} is not UTF-8 text ({error})") from None
    except OSError as error:
        raise _refused(path, error) from None


def read_object(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a regular file; raise FileNotFoundError or UnreadableError if there is none."""
    text = read_text(path)
    try:
        value = parse_json(text)
    except UnreadableError as error:
        raise UnreadableError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UnreadableError(f"{path} holds {type(value).__name__}, not an object")
    return value


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, a string or UTF-8 bytes; the message of UnreadableError is the reason alone."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise UnreadableError("nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UnreadableError(str(error)) from None
    except ValueError:  # int() accepts at most 4300 digits
        raise UnreadableError("a number has thousands of digits") from None


def _refused(path: str | Path, error: OSError | ValueError) -> UnreadableError:
    reason = error.strerror if isinstance(error, OSError) else error
    return UnreadableError(f"{path} cannot be read ({reason or error})")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an `OSError` of writing to `path` into an `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror or error}); make room, mend the disk, or name another place: what"
            " was written before is kept"
        ) from error


def within(limit_s: float, function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function; raise TimeoutError if it takes longer than `limit_s`.

    It is called in a thread, which then stays behind: a file system that does not answer cannot be interrupted.
    """
    done = list[T | BaseException]()
    has_ended = threading.Event()

    def call() -> None:
        try:
            done.append(function(*arguments))
        except BaseException as error:  # raised where it is waited for
            done.append(error)
        has_ended.set()

    threading.Thread(target=call, name=getattr(function, "__name__", None), daemon=True).start()
    if not has_ended.wait(limit_s):
        raise TimeoutError(f"no answer within {limit_s:g} s")
    (result,) = done
    if isinstance(result, BaseException):
        raise result
    return result
