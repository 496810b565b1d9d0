"""Signals that end a run between two iterations: SIGTERM, as schedulers send it, or Ctrl-C."""

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
    """Signals go to handlers; they are a main thread's business."""
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
    """A request, by signal, to end the run after the current iteration.

    The second signal does not wait: Ctrl-C is then a KeyboardInterrupt, SIGTERM a SystemExit.
    """

    def __init__(self, saves: bool = True) -> None:
        """`saves`: the run makes a checkpoint then."""
        self.asked = False
        self.heard = False
        """Also when it was too late to end anything."""
        self._interrupted = self._is_late = False
        self._saves = saves

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C ends a run that still begins: at once, or where Python drops the exception, as soon as it has begun."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            raise KeyboardInterrupt

        with _handled({signal.SIGINT: interrupt}):
            yield

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are requests while the context is open; in other threads than the main one, nothing changes."""
        if self._interrupted:
            raise KeyboardInterrupt
        with _handled({signal.SIGINT: self._take, signal.SIGTERM: self._take}):
            yield

    @contextlib.contextmanager
    def too_late(self) -> Iterator[None]:
        """All iterations are done: who asks while the context is open is told that the run ends by itself."""
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
