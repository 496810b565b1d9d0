"""A program in a process of its own that works only when it is asked: lines of JSON there and back."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridengine.errors import WorkerError, WorkerTimeoutError

END_TIMEOUT_S = 5.0
LOG_LINES = 12
"""Last lines of its log that a message shows."""


class TurnTaker:
    """A child that waits for a line on its stdin, works, and answers with a line; idle, it takes no time of the cores.

    Its first line says that it is ready. A context manager, which ends the child and everything that it has started.

    Args:
        name: of the program, for messages.
        log: file for what it prints.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._name, self._log = name, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        assert self._process.stdin and self._process.stdout, "both are pipes"
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._rest = b""

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next line.

        Raises:
            WorkerTimeoutError: none in time.
            WorkerError: the child has ended, or says something else.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerTimeoutError(
                    f"{self._name} has not answered within {timeout_s:g} s; allow more with --timeout{self._last_lines()}"
                )
            if self._selector.select(left):
                part = self._output.read()
                if part == b"":
                    raise WorkerError(f"{self._name} has ended{self._last_lines()}")
                self._rest += part or b""
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise WorkerError(
                f"{self._name} answered {line[:200]!r}, which is no JSON object{self._last_lines()}"
            )
        if "error" in answer:
            raise WorkerError(f"{self._name}: {answer['error']}{self._last_lines()}")
        return answer

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to a message.

        Raises:
            WorkerError, WorkerTimeoutError: as `receive`.
        """
        with contextlib.suppress(BrokenPipeError):  # receive says why it has ended
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()
        return self.receive(timeout_s)

    def close(self) -> None:
        """End the child."""
        with contextlib.suppress(OSError):
            self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        self._output.close()

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines)

    def __enter__(self) -> TurnTaker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
