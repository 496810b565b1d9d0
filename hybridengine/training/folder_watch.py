"""Limit on the time in which the file system of a run's folder answers.

A call to one whose server is gone blocks its thread for as long as that lasts, and cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridengine.checkpoints.run_lock import LOCK_FILE
from hybridengine.files import within
from hybridengine.formatting import format_seconds

PROBE_EVERY_S = 5.0
WARN_S = 30.0
"""Time without an answer after which it is reported."""
PRINT_LIMIT_S = 5.0


@contextmanager
def watched_folder(folder: Path, limit_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Report a folder that does not answer for `WARN_S`, and end this process, with its ranks, after `limit_s`."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(PROBE_EVERY_S):
            _probe(folder, limit_s, say, over)

    threading.Thread(target=watch, name="folder-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _probe(folder: Path, limit_s: float, say: Callable[[str], None], over: threading.Event) -> None:
    begin, done = time.monotonic(), threading.Event()

    def touch() -> None:
        with contextlib.suppress(OSError):  # an error is an answer
            _touch(folder)
        done.set()

    threading.Thread(target=touch, name="folder-probe", daemon=True).start()
    where = f"{folder} on host {socket.gethostname()}"
    warn_s = min(WARN_S, limit_s / 2)
    if done.wait(warn_s) or over.is_set():
        return
    said = f"warning: {where} has not answered for {warn_s:g} s; the run waits for it, up to {limit_s:g} s"
    _print_within(say, f"{said} (timeouts.save_s)")
    if done.wait(limit_s - warn_s):
        _print_within(say, f"{folder} answers again, after {format_seconds(time.monotonic() - begin)}")
    elif not over.is_set():
        error = (
            f"hybridengine: OutputError: {where} has not answered for {limit_s:g} s (timeouts.save_s); check its file"
            " system, the server of that and the network to it; what was saved before is kept, and resume=auto resumes"
        )
        _print_within(lambda text: print(text, file=sys.stderr, flush=True), error)
        os._exit(1)  # the main thread may be blocked; Ray ends the ranks of a process that has ended


def _touch(folder: Path) -> None:
    """Ask the file system's server: change the time of the run's lock, or ask for the space where there is none yet."""
    try:
        os.utime(folder / LOCK_FILE)
    except FileNotFoundError:
        os.statvfs(next(place for place in (folder, *folder.parents) if place.exists()))


def _print_within(say: Callable[[str], None], text: str) -> None:
    with contextlib.suppress(OSError):  # the output may be a file in the same folder
        within(PRINT_LIMIT_S, say, text)
