"""Output of a launch: its own lines, and what it passes on until its process has ended and all of it is written."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TextIO

OUTPUT_LIMIT_S, STEP_S = 5.0, 0.1
"""Time limit for other processes to close the output of one that has ended, and for a reader once it is not waited for
any more; and interval at which both are looked at."""


def written(text: bytes, stream: TextIO | None, gives_up: Callable[[], bool]) -> bool:
    """Write to a stream; return False if nobody has read it for OUTPUT_LIMIT_S in which `gives_up` holds.

    Python's own buffer would keep what cannot be written, and its lock is wanted when Python ends. There is no stream
    where a program is started without one.
    """
    left, left_s = memoryview(text), OUTPUT_LIMIT_S
    while left and stream is not None:
        if select.select((), (stream,), (), STEP_S)[1]:
            with suppress(BlockingIOError):  # of a pipe that another program fills as well
                # Writing more than a pipe is sure to take would wait for its reader.
                left = left[os.write(stream.fileno(), left[: select.PIPE_BUF]) :]
                left_s = OUTPUT_LIMIT_S
        elif gives_up():
            left_s -= STEP_S
            if left_s <= 0:
                return False
    return True


@contextmanager
def passed_on(output: IO[bytes] | None, gives_up: Callable[[], bool]) -> Iterator[None]:
    """Pass the output of a process on to stdout, and drop it once nobody reads that any more.

    A run that wrote to a connection that is gone would end at once, without saving its step.
    """
    writing = threading.Lock()

    def pass_on() -> None:
        is_read = True
        for line in output or ():
            with writing:
                try:
                    is_read = is_read and written(line, sys.stdout, gives_up)
                except OSError:
                    is_read = False

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        wait_for_output([thread], writing, gives_up)


def wait_for_output(
    threads: Sequence[threading.Thread], writing: threading.Lock, gives_up: Callable[[], bool]
) -> None:
    """Wait for threads that pass output on: while one writes, until `gives_up` holds, and OUTPUT_LIMIT_S beside."""
    left_s = OUTPUT_LIMIT_S
    while left_s > 0 and (alive := [thread for thread in threads if thread.is_alive()]):
        alive[0].join(STEP_S)
        if gives_up() or not writing.locked():
            left_s -= STEP_S
