"""Failures of ranks as they reach the controller: as data, so that no class needs to unpickle to be reported.

Every call of a rank process ends in an `Outcome`; an exception becomes the `RankFailure` inside it. The controller
turns failures into a `RankFailedError` (one rank, with its traceback) and hangs into a `WorkerTimeoutError`.
"""

from __future__ import annotations

import pickle
import re
import traceback
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath

from ray.exceptions import RayError

from hybridengine.controller.calls import InputFailedError
from hybridengine.errors import HybridEngineError, StorageError, TransferError, WorkerError
from hybridengine.redaction import without_secrets

PASSING = (StorageError, TransferError, WorkerError)
"""Errors of this project that say something of the moment, not of what was asked for."""
_NUMBER = re.compile(r"(0x)?[0-9a-f]*\d[0-9a-f]*", re.IGNORECASE)
"""Decimal or hexadecimal, also where a unit or a name goes on with it."""
MAX_END = 50_000
"""Characters kept at each end of an exception's text: some print tensors, and secrets are looked for in all of it."""


@dataclass(frozen=True)
class RankFailure:
    """Why one rank could not do what it was asked."""

    rank: int
    error: str
    """Class name and message of the exception, or how the process died."""
    traceback: str = ""
    """Traceback on the rank; empty where the process died."""
    pickled: bytes | None = None
    """The exception itself, where it can be pickled."""
    died: bool = False
    """The process is gone, and every role in it."""
    lacks_input: bool = False
    """Rows that the call was given were never produced: the echo of another call's failure."""
    in_collective: bool = False
    """Raised inside torch.distributed: usually the echo of another rank's failure."""
    role: str = ""
    method: str = ""
    place: str = ""
    """Coordinate and node, e.g. "pp=0 dp=0 tp=1, node 10.0.0.4"."""

    @property
    def original(self) -> BaseException | None:
        """The exception raised on the rank; None where it cannot cross processes."""
        if self.pickled is None:
            return None
        try:
            return pickle.loads(self.pickled)
        except Exception:  # the class is unknown here, or its constructor wants other arguments
            return None

    @property
    def operation(self) -> str:
        return f"{self.role}.{self.method}" if self.role else self.method


@dataclass(frozen=True)
class Outcome:
    """End of one call on one rank."""

    rank: int
    begin: float
    """Time when the rank took the call up, in seconds since the epoch."""
    end: float
    failure: RankFailure | None = None
    fetch_seconds: float = 0.0
    """Part of the time between them until the call's rows were there."""
    transferred: dict[str, int] = field(default_factory=dict)
    """Bytes of rows that other processes had produced, by the call that had."""
    inline_bytes: int = 0
    """Bytes of rows inside the call's arguments and result, which Ray carries through the controller."""
    held_bytes: dict[str, int] = field(default_factory=dict)
    """Memory that the rank's process held at the end (`runtime.host_memory.held_bytes`)."""

    @property
    def seconds(self) -> float:
        """From the beginning to the end."""
        return self.end - self.begin


class RankFailedError(WorkerError):
    """A rank raised or died; the message has its traceback.

    The exception that the rank raised is the ``__cause__``, where it could travel.
    """

    def __init__(self, message: str, failure: RankFailure) -> None:
        super().__init__(message, failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.args[0]


def failure_of(rank: int, error: BaseException) -> RankFailure:
    """Describe an exception on the rank that raised it."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # an exception that cannot travel is reported as text
        pickled = None
    return RankFailure(
        rank=rank,
        error=_told(f"{type(error).__name__}: {_text_of(error)}"),
        traceback=_told("".join(traceback.format_exception(error))),
        pickled=pickled,
        lacks_input=isinstance(error, InputFailedError),
        in_collective=_lost_a_peer(error),
    )


def rank_failed(failure: RankFailure, others: list[RankFailure]) -> RankFailedError:
    """The error for a failed rank; `others` are ranks that failed in the same call and are only counted."""
    verb = "died" if failure.died else "failed"
    message = f"{failure.operation} {verb} on rank {failure.rank} ({failure.place}): {failure.error}"
    if others:
        named = ", ".join(f"{other.rank} ({_first_line(other.error)})" for other in others)
        message += f"\nalso failed: rank {named}"
    if failure.traceback:
        message += f"\ntraceback on rank {failure.rank}:\n{failure.traceback.rstrip()}"
    error = RankFailedError(message, failure)
    error.__cause__ = failure.original
    return error


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # as in a traceback


def _told(text: str) -> str:
    """Return `text` without secrets, and of a very long one only both ends."""
    if len(text) > 2 * MAX_END:
        begin, _, _ = text[:MAX_END].rpartition(" ")  # between words: no secret is cut in two
        _, _, end = text[-MAX_END:].partition(" ")
        text = f"{begin} ... ({len(text)} characters) ... {end}"
    return without_secrets(text)


def root_cause(failures: list[RankFailure]) -> tuple[RankFailure, list[RankFailure]]:
    """The failure to report and the others: a dead rank before an exception before the echo of one."""
    ordered = sorted(
        failures,
        key=lambda failure: (not failure.died, failure.lacks_input, failure.in_collective, failure.rank),
    )
    return ordered[0], ordered[1:]


def is_passing(error: BaseException) -> bool:
    """Return whether a failure may be gone when the ranks start again: a process, a link or an engine failed, no rule."""
    if isinstance(error, RankFailedError):
        if error.failure.died or error.failure.in_collective:
            return True
        original = error.failure.original
        return not isinstance(original, HybridEngineError) or isinstance(original, PASSING)
    return isinstance(error, WorkerError | RayError)


def failure_signature(error: BaseException) -> str:
    """Return what repeated failures have in common: their text without numbers of processes, ports and bytes."""
    if isinstance(error, RankFailedError):
        what, text = error.failure.operation, error.failure.error
    else:
        what, text = type(error).__name__, str(error)
    return f"{what} {_first_line(_NUMBER.sub('#', text))}"


def _lost_a_peer(error: BaseException | None) -> bool:
    """Return True if the exception, or one that it was raised from, comes from a collective."""
    while error is not None:
        if _is_of_a_collective(error):
            return True
        error = error.__cause__
    return False


def _is_of_a_collective(error: BaseException) -> bool:
    """Return True for an error that names torch.distributed or gloo, or whose innermost frame is in torch.distributed."""
    if type(error).__module__.startswith("torch.distributed") or "/gloo/" in _text_of(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and ("torch", "distributed") in pairwise(PurePath(frames[-1].filename).parts)


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:200]
