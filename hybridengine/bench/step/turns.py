"""Child process that works only on request."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridengine.errors import WorkerError, WorkerTimeoutError

END_TIMEOUT_S = 5.0
LOG_LINES = 12
"""Number of last lines of the log that an error message shows."""


class TurnTaker:
    """Child process that waits for a message, works and answers; it uses no CPU time while idle.

    Its last argument is the file descriptor of a `multiprocessing.connection.Connection` for messages. A context manager
    that ends the child and all of its child processes.

    Args:
        name: name of the program, for messages.
        log: file for its output.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._name, self._log = name, log
        self._channel, theirs = multiprocessing.Pipe()
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def ask(self, message: Any, timeout_s: float) -> dict[str, Any]:
        """Return the answer to a message.

        Raises:
            WorkerTimeoutError: no answer arrived in time.
            WorkerError: the child failed, or has ended.
        """
        try:
            self._channel.send(message)
            answered = self._channel.poll(timeout_s)
            answer = self._channel.recv() if answered else {}
        except (EOFError, OSError):
            raise WorkerError(f"{self._name} has ended{self._last_lines()}") from None
        if not answered:
            raise WorkerTimeoutError(
                f"{self._name} has not answered within {timeout_s:g} s; allow more with --timeout{self._last_lines()}"
            )
        if "error" in answer:
            raise WorkerError(f"{self._name}: {answer['error']}{self._last_lines()}")
        return answer

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines)

    def __enter__(self) -> TurnTaker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
