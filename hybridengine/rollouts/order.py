"""The order in which engines' calls ended, recorded in a run so that another one can repeat it bit for bit.

Which requests an engine gets, and which weights draw a token, depends on which calls end first. Everything else follows
from the configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hybridengine.errors import DataError


class Wait(NamedTuple):
    """A wait of the controller, for a batch or for the trainer."""

    step: int
    """Iteration in which it waits, from 1."""
    ended: list[list[int]]
    """Engines whose calls ended, for each time that the wait was interrupted."""


class CallOrder:
    """Writes the order of a run's calls to a file, a line for each wait; or repeats that of another run's file."""

    def __init__(self, file: Path, replay: Path | None = None) -> None:
        self._file = file
        self._replayed: Iterator[Wait] | None = None
        self._replay = replay

    def go_on_after(self, step: int) -> None:
        """Begin after the iterations up to `step`; what was recorded of later ones is forgotten."""
        kept = [wait for wait in read_order(self._file) if wait.step <= step] if self._file.exists() else []
        self._file.write_text("".join(f"{json.dumps(wait)}\n" for wait in kept))
        if self._replay is not None:
            self._replayed = (wait for wait in read_order(self._replay) if wait.step > step)

    def next_wait(self, step: int) -> list[list[int]] | None:
        """Return the interruptions of the next wait, which are to be repeated; None if the order is free.

        Raises DataError if the repeated run has no such wait.
        """
        if self._replayed is None:
            return None
        wait = next(self._replayed, None)
        if wait is None or wait.step != step:
            raise self.mismatch(f"a wait of step {wait.step}" if wait else "no more waits", step)
        return wait.ended

    def mismatch(self, found: str, step: int) -> DataError:
        """Return the error for a file that has something in which this run has nothing to repeat."""
        return DataError(
            f"generation.replay={self._replay} has {found} where step {step} waits; name the file of a run with the same"
            " configuration"
        )

    def record(self, wait: Wait) -> None:
        """Append a wait to the file."""
        with self._file.open("a") as file:
            file.write(f"{json.dumps(wait)}\n")


def read_order(file: Path) -> list[Wait]:
    """Return the waits in a file; an incomplete last line, of a run that was killed, is left out.

    Raises DataError if the file cannot be read, or is of another kind.
    """
    try:
        lines = file.read_text().split("\n")[:-1]
        return [
            Wait(int(step), [[*map(int, engines)] for engines in ended])
            for step, ended in map(json.loads, lines)
        ]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{file} is not the order of a run's calls ({type(error).__name__}: {error}); name the file calls.jsonl of an"
            " asynchronous run"
        ) from error
