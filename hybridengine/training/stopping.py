"""Signals that end a run between two iterations: SIGTERM, as schedulers send it, or Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """A request, by signal, to end the run after the current iteration.

    The second signal does not wait: Ctrl-C is then a KeyboardInterrupt, SIGTERM a SystemExit.
    """

    def __init__(self, saves: bool = True) -> None:
        """`saves`: the run makes a checkpoint when it stops."""
        self.asked = False
        self.heard = False
        """True after any signal, also one that was too late to end anything."""
        self._is_late = False
        self._saves = saves

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests while the context is open; only the main thread of a process can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def too_late(self) -> Iterator[None]:
        """Answer a signal, while the context is open, that the run ends by itself."""
        self._is_late = True
        try:
            yield
        finally:
            self._is_late = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.heard:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        self.heard, self.asked = True, not self._is_late
        again = "Ctrl-C again" if number == signal.SIGINT else "a second SIGTERM"
        saved = ", and is saved" if self._saves else ""
        ends = "once its trained model is saved" if self._is_late else f"after this step{saved}"
        text = f"{signal.Signals(number).name}: the run ends {ends}; {again} ends it at once\n"
        with contextlib.suppress(OSError, RuntimeError):  # closed, or in the middle of another text
            sys.stderr.write(text)
            sys.stderr.flush()
