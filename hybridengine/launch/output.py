"""Output that a launch passes on, until its process has ended and all of it is written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

OUTPUT_LIMIT_S, JOIN_S = 5.0, 0.1
"""Time limit for other processes to close the output of one that has ended, and interval at which this is looked at."""


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
                    if is_read:
                        sys.stdout.buffer.write(line)
                        sys.stdout.buffer.flush()
                except OSError:
                    is_read = False

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        wait_for_output(thread, writing, gives_up)


def wait_for_output(thread: threading.Thread, writing: threading.Lock, gives_up: Callable[[], bool]) -> None:
    """Wait for a thread that passes output on: while it writes, until `gives_up` holds, and OUTPUT_LIMIT_S beside."""
    left_s = OUTPUT_LIMIT_S
    while thread.is_alive() and left_s > 0:
        thread.join(JOIN_S)
        if gives_up() or not writing.locked():
            left_s -= JOIN_S
