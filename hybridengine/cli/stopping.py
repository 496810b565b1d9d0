"""Ending a run between two iterations: SIGTERM, as schedulers send it, or Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether somebody wants the run to end after the iteration that is under way.

    The second signal does not wait: Ctrl-C is then a KeyboardInterrupt, SIGTERM a SystemExit.
    """

    def __init__(self, saves: bool = True) -> None:
        """`saves`: what is done is saved then."""
        self.asked = False
        self._saves = saves

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are requests while the context is open; in other threads than the main one, nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        self.asked = True
        again = "Ctrl-C again" if number == signal.SIGINT else "a second SIGTERM"
        saved = ", and is saved" if self._saves else ""
        text = (
            f"{signal.Signals(number).name}: the run ends after this step{saved}; {again} ends it at once\n"
        )
        with contextlib.suppress(OSError, RuntimeError):  # closed, or in the middle of another text
            sys.stderr.write(text)
            sys.stderr.flush()
