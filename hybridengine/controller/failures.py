"""Outcomes and failures of calls on ranks, as plain data that needs no class of the rank to be unpickled."""

from __future__ import annotations

import pickle
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath

from ray import ObjectRef
from ray.exceptions import RayActorError, RayError

from hybridengine.errors import HybridEngineError, StorageError, TransferError, WorkerError
from hybridengine.redaction import without_secrets

PASSING = (StorageError, TransferError, WorkerError)
"""Errors of this project that may be transient, as opposed to errors of the input."""
_NUMBER = re.compile(r"(0x)?[0-9a-f]*\d[0-9a-f]*", re.IGNORECASE)
"""Decimal or hexadecimal number, including a directly following unit or name."""
MAX_END = 50_000
"""Characters kept at each end of an exception's text: some print tensors, and all of the text is searched for secrets."""


class InputFailedError(WorkerError):
    """Input rows of the call do not exist, because the call that should have produced them failed."""


@dataclass(frozen=True)
class RankFailure:
    """Failure of one rank in a call."""

    rank: int
    error: str
    """Class name and message of the exception, or the way in which the process died."""
    traceback: str = ""
    """Traceback on the rank; empty if the process died."""
    pickled: bytes | None = None
    """The pickled exception, if it can be pickled."""
    died: bool = False
    """True if the process, with every role in it, is gone."""
    lacks_input: bool = False
    """True if input rows of the call were never produced: a consequence of another call's failure."""
    in_collective: bool = False
    """True if raised inside torch.distributed: usually a consequence of another rank's failure."""
    role: str = ""
    method: str = ""
    place: str = ""
    """Coordinate and node, such as "pp=0 dp=0 tp=1, node 10.0.0.4"."""

    @property
    def original(self) -> BaseException | None:
        """Exception raised on the rank, or None if it could not be transferred."""
        if self.pickled is None:
            return None
        try:
            return pickle.loads(self.pickled)
        except Exception:  # the class is unknown here, or its constructor takes other arguments
            return None

    @property
    def operation(self) -> str:
        return f"{self.role}.{self.method}" if self.role else self.method


@dataclass(frozen=True)
class Outcome:
    """Times, bytes and failure of one call on one rank."""

    begin: float
    """Time at which the rank started the call, in seconds since the epoch."""
    end: float
    failure: RankFailure | None = None
    fetch_seconds: float = 0.0
    """Seconds from the start until the call's input rows were available."""
    transferred: dict[str, int] = field(default_factory=dict)
    """Bytes of rows read from other processes, by producing call."""
    inline_bytes: int = 0
    """Bytes of rows inside the call's arguments and result, transferred by Ray through the controller."""
    held_bytes: dict[str, int] = field(default_factory=dict)
    """Memory held by the rank's process at the end of the call, by name (`machine.held_bytes`)."""
    result: bytes | None = None
    """The pickled result of a source rank, unless it is rows."""


Answer = dict[int, Outcome | ObjectRef]
"""Rank -> its outcome, or a reference to an outcome that has not arrived yet."""


def answer_of(ranks: Sequence[int], value: Outcome | Answer) -> Answer:
    """Return the answer of a branch of ranks, from what its process has returned."""
    return {ranks[0]: value} if isinstance(value, Outcome) else value


def lost_answer(ranks: Sequence[int], error: RayError) -> Answer:
    """Return the answer of ranks whose process, or relay, has died or could not be sent its call."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if len(ranks) > 1:
        text = f"the relay of ranks {ranks[0]} to {ranks[-1]} has failed, and these are lost: {text}"
    now, died = time.time(), isinstance(error, RayActorError)
    return {rank: Outcome(now, now, RankFailure(rank, text, died=died)) for rank in ranks}


class RankFailedError(WorkerError):
    """A rank raised or died; the message contains its traceback, and ``__cause__`` is its exception if transferable."""

    def __init__(self, message: str, failure: RankFailure) -> None:
        super().__init__(message, failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.args[0]


def failure_of(rank: int, error: BaseException) -> RankFailure:
    """Return the description of an exception on the rank that raised it."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # an exception that cannot be pickled is reported as text
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
    """Return the error for a failed rank; `others` are ranks that failed in the same call and are only counted."""
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
    """Return `text` without secrets; only both ends of a very long text."""
    if len(text) > 2 * MAX_END:
        begin, _, _ = text[:MAX_END].rpartition(" ")  # cut between words, so that no secret is split
        _, _, end = text[-MAX_END:].partition(" ")
        text = f"{begin} ... ({len(text)} characters) ... {end}"
    return without_secrets(text)


def root_cause(failures: list[RankFailure]) -> tuple[RankFailure, list[RankFailure]]:
    """Return the failure to report, and the others: dead ranks take precedence over exceptions, and these over echoes."""
    ordered = sorted(
        failures,
        key=lambda failure: (not failure.died, failure.lacks_input, failure.in_collective, failure.rank),
    )
    return ordered[0], ordered[1:]


def is_passing(error: BaseException) -> bool:
    """True if a failure may not recur after a restart of the ranks: one of a process, link or engine, not of a rule."""
    if isinstance(error, RankFailedError):
        if error.failure.died or error.failure.in_collective:
            return True
        original = error.failure.original
        return not isinstance(original, HybridEngineError) or isinstance(original, PASSING)
    return isinstance(error, WorkerError | RayError)


def is_unforeseen(error: BaseException) -> bool:
    """True if a rank that is alive raised an error that is not of this project: the call's input may be the cause."""
    if not isinstance(error, RankFailedError):
        return False
    failure = error.failure
    raised = bool(failure.traceback) and not failure.in_collective
    return raised and not isinstance(failure.original, HybridEngineError)


def failure_signature(error: BaseException) -> str:
    """Return the common part of repeated failures: their text without numbers such as pids, ports and bytes."""
    if isinstance(error, RankFailedError):
        what, text = error.failure.operation, error.failure.error
    else:
        what, text = type(error).__name__, str(error)
    return f"{what} {_first_line(_NUMBER.sub('#', text))}"


def _lost_a_peer(error: BaseException | None) -> bool:
    """True if the exception, or one that it was raised from, names gloo or comes from torch.distributed."""
    while error is not None:
        if type(error).__module__.startswith("torch.distributed") or "/gloo/" in _text_of(error):
            return True
        frames = traceback.extract_tb(error.__traceback__)
        if frames and ("torch", "distributed") in pairwise(PurePath(frames[-1].filename).parts):
            return True
        error = error.__cause__
    return False


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:200]
