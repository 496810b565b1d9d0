"""Signals that end a run between two iterations: Ctrl-C, or SIGTERM from a scheduler."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def _handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Handle signals while the context is open, in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequest:
    """Request, by signal, to end the run after the current iteration; `saves` if it then writes a checkpoint.

    A second signal ends the run at once: Ctrl-C raises KeyboardInterrupt, SIGTERM raises SystemExit.
    """

    def __init__(self, saves: bool = True) -> None:
        self.asked = False
        self.heard = False
        """True after any signal, including one that arrived too late to stop the run early."""
        self._interrupted = self._is_late = False
        self._saves = saves

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """End a starting run at Ctrl-C: at once, or when it has started if a library's callback drops the exception."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            raise KeyboardInterrupt

        with _handled({signal.SIGINT: interrupt}):
            yield

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals as requests while the context is open, in the main thread only."""
        if self._interrupted:
            raise KeyboardInterrupt
        with _handled({signal.SIGINT: self._take, signal.SIGTERM: self._take}):
            yield

    @contextlib.contextmanager
    def too_late(self) -> Iterator[None]:
        """Answer signals, while the context is open, with the message that the run is already ending."""
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
        with contextlib.suppress(OSError, RuntimeError):  # stderr is closed, or is being written
            sys.stderr.write(text)
            sys.stderr.flush()
