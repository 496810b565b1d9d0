"""A reward function in its own process: loaded, called and checked there (`guarded/guard.py` runs it).

Rank and function exchange lines of JSON, so that reading them executes no code. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import io
import json
import reprlib
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import FrameType
from typing import Any

from hybridengine import importing
from hybridengine.errors import ConfigError, DataError
from hybridengine.guarded import guard
from hybridengine.guarded.guard import limit_memory

LARGEST_SCORE = 3.4028234663852886e38
"""Largest score: scores are stored as float32."""
MAX_TEXT = 6000
"""Characters of a traceback that are sent, from its beginning and end."""
LEADING_FILES = (__file__, guard.__file__, importing.__file__, importlib.__file__, "<frozen importlib")
"""Files with the frames between this module and the function or its module."""

Columns = Mapping[str, Sequence[Any]]
Reply = tuple[str, str, int | None, str]
""" "raised" or "wrong", error text, row of the call, traceback."""


class WrongScores(Exception):
    """The function did not return one number per row."""


def serve(channel: socket.socket) -> None:
    """Load a function and answer calls until the peer closes the channel.

    Requests: ["load", key, path, offered columns, memory_bytes or null, deadline], then ["call", columns, deadline].
    At the deadline, on the system-wide monotonic clock, the stacks of all threads are written to stderr; the peer ends
    the process.
    Replies: ["loaded", columns that the function takes], ["scores", numbers], or a `Reply`.
    """
    requests = channel.makefile("rb")
    function, extra = None, []
    while True:
        try:
            line = requests.readline()
        except ConnectionError:  # the peer has ended
            return
        if not line.endswith(b"\n"):  # closed
            return
        kind, *content, deadline = json.loads(line)
        faulthandler.dump_traceback_later(max(1e-3, deadline - time.monotonic()), file=2)
        if kind == "load":
            reply, function, extra = _load(*content)
        else:
            assert function is not None, "load comes first"
            reply = call_function(function, content[0], extra)
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(Exception):  # the function may have replaced it
            sys.stdout.flush()
        channel.sendall(json.dumps(reply).encode() + b"\n")


def load_reward_function(path: str, key: str = "reward.function") -> Callable[..., Any]:
    """Return the function at "package.module:function", or raise DataError; messages refer to the path as `key`."""
    try:
        function = importing.import_object(path)
    except ConfigError as error:
        reason = error.__cause__
        raise DataError(
            f"{key}={path} cannot be imported ({reason}); name package.module:function of a module that is"
            " installed, or in the folder where the command is run"
        ) from reason
    if not callable(function):
        raise DataError(f"{key}={path} is a {type(function).__name__}; name a function")
    return function


def wanted_columns(function: Callable[..., Any], offered: Sequence[str], name: str) -> list[str]:
    """Return the offered columns that `function` takes: all with **columns, none if Python cannot inspect its signature.

    Raises DataError, with `name` in the message, if it cannot be called with these columns.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    parameters = signature.parameters.values()
    columns = [p.name for p in parameters if p.name in offered and p.kind is not p.POSITIONAL_ONLY]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        columns = list(offered)
    try:
        signature.bind([], [], **dict.fromkeys(columns))
        first, second, *_ = [*signature.parameters, "", ""]
        if first == "answers" or second == "responses":
            raise TypeError("responses come first")
    except TypeError as error:
        usage = "write function(responses, answers)"
        if offered:
            usage += f", and after them any of {', '.join(offered)}"
        called = ", ".join(["responses", "answers", *(f"{column}=..." for column in columns)])
        raise DataError(
            f"{name} takes {signature}, and cannot be called with ({called}): {error}; {usage}"
        ) from None
    return columns


def call_function(function: Callable[..., Any], columns: Columns, extra: Iterable[str]) -> tuple:
    """Call a function, which may be a coroutine; return ("scores", one float per row), or a `Reply` with its failure."""
    scores: list[float] = []
    row_is_known = False
    try:
        result = function(columns["responses"], columns["answers"], **{name: columns[name] for name in extra})
        if inspect.iscoroutine(result):
            import asyncio  # takes half of the start time, and is seldom needed

            result = asyncio.run(result)
        values = _iterator(result)
        row_is_known = True  # lazy results raise while they are read
        num_rows = len(columns["responses"])
        for value in values:
            if len(scores) == num_rows:
                row_is_known = False
                raise WrongScores(f"returned more scores than the {num_rows} responses; return one for each")
            scores.append(_number(value))
        row_is_known = False
        if len(scores) < num_rows:
            raise WrongScores(f"returned {len(scores)} scores for {num_rows} responses; return one for each")
    except WrongScores as error:
        return "wrong", str(error), len(scores) if row_is_known else None, ""
    except BaseException as error:  # also SystemExit: the function's process stays alive
        row = len(scores) if row_is_known else _row_at_hand(error, columns)
        return _raised(error, row)
    return "scores", scores


def _load(
    key: str, path: str, offered: Sequence[str], memory_bytes: int | None
) -> tuple[tuple, Callable[..., Any] | None, list[str]]:
    """Load a function; return the reply, the function and the columns that it takes."""
    try:
        limit_memory(memory_bytes)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        function = load_reward_function(path, key)
        extra = wanted_columns(function, offered, f"{key}={path}")
    except DataError as error:
        return ("wrong", str(error), None, _trace(error.__cause__, even_without_frames=False)), None, []
    except BaseException as error:  # a module may raise anything when imported
        return _raised(error, None), None, []
    return ("loaded", extra), function, extra


def _iterator(result: Any) -> Iterable[Any]:
    if isinstance(result, str | bytes | Mapping | Set) or not hasattr(type(result), "__iter__"):
        text = f"returned {shown(result)}, a {type(result).__name__}"
        raise WrongScores(f"{text}; return a list with one number for each response")
    return iter(result)


def _number(value: Any) -> float:
    with contextlib.suppress(Exception):  # arrays and tensors of several numbers, oversized integers
        if hasattr(type(value), "__float__") and abs(number := float(value)) <= LARGEST_SCORE:
            return number
    text = f"returned {shown(value)}, a {type(value).__name__}"
    raise WrongScores(f"{text}; return a finite number that a float32 can hold")


def _raised(error: BaseException, row: int | None) -> Reply:
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)  # the memory that they hold is needed now
    reason = traceback.format_exception_only(error)[-1].strip()
    return "raised", f"raised {_shortened(reason, 1000)}", row, _trace(error)


def _trace(error: BaseException | None, even_without_frames: bool = True) -> str:
    """Return the traceback from the function or its module on; a SyntaxError has no frames, and names its line."""
    frames = error.__traceback__ if error else None
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(LEADING_FILES):
        frames = frames.tb_next
    if error is None or (frames is None and not even_without_frames):
        return ""
    return _shortened("".join(traceback.format_exception(type(error), error, frames)).rstrip())


def _row_at_hand(error: BaseException, columns: Columns) -> int | None:
    """Return the row whose text is in a variable of the innermost frame that has any row's text; None for several."""
    rows: dict[int, set[int]] = {}
    for column in columns.values():
        for row, value in enumerate(column):
            if isinstance(value, str) and len(value) > 1:  # single characters are shared by all strings
                rows.setdefault(id(value), set()).add(row)
    frames: list[FrameType] = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames[1:]):
        if found := [rows[id(value)] for value in frame.f_locals.values() if id(value) in rows]:
            common = set.intersection(*found)
            return common.pop() if len(common) == 1 else None
    return None


def shown(value: Any) -> str:
    return _shortened(reprlib.repr(value).replace("\n", " "), 80)


def _shortened(text: str, limit: int = MAX_TEXT) -> str:
    if len(text) <= limit:
        return text
    begin = limit // 3
    return f"{text[:begin]} ... {text[begin - limit :]}"
