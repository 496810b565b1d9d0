"""Reading of regular files supplied by users, with uniform errors.

These errors give the value and the rule; the caller adds the remedy.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from hybridengine.errors import UnreadableError


def check_regular(path: str | Path) -> None:
    """Check that `path` is a regular file or a link to one; reading a pipe or a device might block or never end.

    Raises:
        FileNotFoundError: the file does not exist.
        UnreadableError: it is not a regular file, or its type cannot be read.
    """
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
    """Return the UTF-8 text of a regular file.

    Raises:
        FileNotFoundError: the file does not exist.
        UnreadableError: it cannot be read, or is not UTF-8 text.
    """
    check_regular(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path} is not UTF-8 text ({error})") from None
    except OSError as error:
        raise _refused(path, error) from None


def read_object(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a regular file.

    Raises:
        FileNotFoundError: the file does not exist.
        UnreadableError: it cannot be read, is not JSON, or is not an object.
    """
    text = read_text(path)
    try:
        value = parse_json(text)
    except UnreadableError as error:
        raise UnreadableError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UnreadableError(f"{path} holds {type(value).__name__}, not an object")
    return value


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, given as a string or UTF-8 bytes.

    Raises:
        UnreadableError: the text is not JSON; the message is the reason alone, for use in the caller's message.
    """
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
