"""Restarts of a server's ranks after failures that may pass."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hybridengine.errors import RanksLostError, WorkerError
from hybridengine.serving.ranks import Ranks

logger = logging.getLogger(__name__)


class Restarts:
    """Starts `ranks` again and restores what they held by `restore`, at most `most` times in the life of the server.

    Restarts after requests that may have caused their own failure (`RanksLostError.unforeseen`) are not counted: these
    fail at once.
    """

    def __init__(self, ranks: Ranks, most: int, restore: Callable[[], None]) -> None:
        self.notice: str | None = None
        """Why no requests are carried out now; None while they are."""
        self.starts = 0
        """Number of times that the ranks have been started again."""
        self._ranks, self._most, self._restore = ranks, most, restore
        self._number = 0
        self._losses = set[str]()
        """Requests in which the ranks were lost, each with the signature of the failure."""

    def is_first(self, what: str, error: Exception) -> bool:
        """Return True if the ranks were lost in `what` without being its fault, and never in the same way before."""
        if not isinstance(error, RanksLostError) or error.unforeseen:
            return False
        loss = f"{what} {error.signature}"
        is_new = loss not in self._losses
        self._losses.add(loss)
        return is_new

    def recover(self, failure: RanksLostError) -> None:
        """Start the ranks again and restore what they held; raise WorkerError when that is no use any more."""
        if self.notice is not None:  # another thread has failed to
            raise WorkerError(f"{failure}\n{self.notice}, which failed") from failure
        counted, before = not failure.unforeseen, ""
        while True:
            if counted and self._number >= self._most:
                raise WorkerError(
                    f"{failure}\nthe ranks have been started again {self._number} times, and faults.max_restarts="
                    f"{self._most}"
                ) from failure
            self._number += counted
            count = f" ({self._number} of at most {self._most} times)" if counted else ""
            self.notice = f"the server starts its ranks again{count}: {cause_of(failure)}"
            logger.warning("%s", self.notice)
            try:
                self._ranks.restart()
            except Exception as error:
                if not isinstance(error, RanksLostError) or error.signature == before:
                    raise WorkerError(f"{failure}\nthe ranks could not start again: {error}") from error
                failure, counted, before = error, True, error.signature
                continue
            try:
                self._restore()
            except RanksLostError as error:
                failure, counted = error, not error.unforeseen
                continue
            self.starts += 1
            self.notice = None
            return


def cause_of(failure: BaseException) -> str:
    """Return the first line of an error, which names role and rank of a failure on one; of a database's, its own."""
    return str(getattr(failure, "orig", None) or failure).split("\n")[0] or type(failure).__name__
