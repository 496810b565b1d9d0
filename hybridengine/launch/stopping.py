"""What stops a node of a launch: signals, which are passed on to the run, and what a launcher says on standard input."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from hybridengine.errors import StoppedError, WorkerError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_LINE, LOST_LINE, OVER_LINE = "stop", "lost", "over"
"""Lines of a launcher over ssh: to the first node, a request to stop and a host that has failed; to all, the end of the
attempt, which a connection that breaks is not."""


class Stopping:
    """Signals and the state of the launcher's connection; make it in the main thread."""

    def __init__(self, *, leads: bool, attached: bool, say: Callable[[str], None]) -> None:
        """Handle signals from now on; with `attached`, watch standard input.

        A node that does not lead ignores signals: a scheduler sends them to all nodes, and the run needs them until it
        has saved its step.
        """
        self.asked, self.is_cut_off, self.is_over = False, False, False
        self._is_interrupted, self._lost = False, ""
        self._leads, self._say = leads, say
        self._run: subprocess.Popen[bytes] | None = None
        for number in SIGNALS:
            signal.signal(number, self._handle)
        if attached:
            threading.Thread(target=self._watch, daemon=True).start()

    def pass_to(self, run: subprocess.Popen[bytes]) -> None:
        """Pass signals on to the process of the run."""
        self._run = run
        if self.asked:
            run.terminate()

    def check(self) -> None:
        """Raise an error if the launcher is gone, or what it says comes before the run.

        Raises:
            WorkerError: the launcher is gone, or a host has failed that the run needs.
            StoppedError, KeyboardInterrupt: SIGTERM or SIGINT came before the run.
        """
        if self.is_cut_off:
            raise WorkerError("the connection to the launcher is gone; start the launch again")
        if self._lost and self._run is None:
            raise WorkerError(f"{self._lost} has failed before the run began; see its lines above")
        if self.asked and self._leads and self._run is None:
            text = "stopped before the run began; start the launch again"
            raise KeyboardInterrupt(text) if self._is_interrupted else StoppedError(text)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.asked, self._is_interrupted = True, number == signal.SIGINT
        if not self._leads:
            self._say(
                f"{signal.Signals(number).name}: this node ends with the run, which the first node stops"
            )
        elif self._run is not None and self._run.poll() is None:
            self._run.send_signal(number)
            self._say(f"{signal.Signals(number).name} is passed on to the run, which saves its step")

    def _watch(self) -> None:
        """Read the launcher's lines; their end is that of the launcher."""
        rest = b""
        with suppress(OSError):  # of a terminal that is gone
            while part := os.read(0, 4096):  # not sys.stdin, whose lock Python wants when it ends
                *lines, rest = (rest + part).split(b"\n")
                for kind, _, host in (text.decode(errors="replace").strip().partition(" ") for text in lines):
                    if kind == STOP_LINE:
                        os.kill(os.getpid(), signal.SIGTERM)
                    elif kind == LOST_LINE:
                        self._lost = host
                    elif kind == OVER_LINE:
                        self.is_over = True
        self.is_cut_off = True
