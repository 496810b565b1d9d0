"""Errors of the project: each message gives the value, the rule it breaks and the remedy.

Every class keeps its constructor arguments in ``args``, so that errors can be pickled (by Ray, for example).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import ClassVar


class HybridEngineError(Exception):
    """Base class of the errors that this project raises."""

    exit_status: ClassVar[int] = 1
    """Exit status of a command that fails with this error: 1 if the run failed, 2 for bad input, 143 if stopped."""

    problems: tuple[str, ...] = ()
    """Problems that `raise_all` has listed in the message."""


class ConfigError(HybridEngineError):
    """A run configuration, or a file that it names, is invalid."""

    exit_status = 2


class UnknownNameError(ConfigError, AttributeError):
    """A dynamic attribute, such as a role or a method of a worker group, does not exist."""


class StoppedError(HybridEngineError):
    """SIGTERM has stopped a command before there was anything to save."""

    exit_status = 143


class TopologyError(HybridEngineError):
    """Parallel sizes, ranks or coordinates are inconsistent."""

    exit_status = 2


class PlanError(HybridEngineError):
    """A layout cannot be converted to another, or a plan no longer describes the weights."""


class TransferError(HybridEngineError):
    """Moving bytes between ranks failed; the message names the operation, bucket and ranks."""


class StorageError(HybridEngineError):
    """Weights were used in a mode in which they have no memory."""


class CheckpointError(HybridEngineError):
    """A checkpoint is missing, truncated or inconsistent with its own configuration."""

    exit_status = 2


class DataError(HybridEngineError):
    """A prompt file, tokenizer or reward function cannot be used."""

    exit_status = 2


class UnreadableError(DataError):
    """A file cannot be read, or its text is not JSON."""


class DriftError(HybridEngineError):
    """The engine and the trainer disagree on the log-probs of the same tokens."""


class StalenessError(HybridEngineError):
    """An update was given tokens that are older than the bound on staleness, or whose age is impossible or unknown."""


class OutputError(HybridEngineError):
    """The output of a run cannot be written, for example because the disk is full."""


class ProtocolError(HybridEngineError):
    """Rows cannot be split over, or collected from, the ranks of a worker group."""


class WrongArgumentsError(ProtocolError, TypeError):
    """A worker method was called with arguments that it does not take."""


class WorkerError(HybridEngineError):
    """A worker method failed; the message names the role, method, rank, coordinate and node."""


class WorkerTimeoutError(WorkerError):
    """A group call timed out; the message names the operation and the ranks that have not answered."""


class RanksLostError(WorkerError):
    """The ranks of a server need to be started again: a rank has died or raised an error, or a call has timed out."""

    def __init__(self, message: str, signature: str = "", unforeseen: bool = False) -> None:
        super().__init__(message, signature, unforeseen)
        self.signature = signature
        """Common part of repeated failures, without numbers such as process ids."""
        self.unforeseen = unforeseen
        """True if the request itself may be the cause (`controller.failures.is_unforeseen`)."""

    def __str__(self) -> str:
        return self.args[0]


class RequestError(HybridEngineError):
    """A request to the server is invalid or comes at a wrong time: the client has to change it, not send it again."""

    exit_status = 2


def raise_all(problems: Iterable[str], error: type[HybridEngineError] = ConfigError) -> None:
    """Raise one `error` that lists every problem; do nothing if there are none."""
    found = list(dict.fromkeys(problems))
    if not found:
        return
    if len(found) == 1:
        raise error(found[0])
    listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(found, start=1))
    raised = error(f"{len(found)} problems:\n{listing}")
    raised.problems = tuple(found)
    raise raised


def shown(value: object) -> str:
    """Return `value` as shortened JSON, for use in a message."""
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # str() converts integers of at most 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
