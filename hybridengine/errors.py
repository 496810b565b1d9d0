"""Errors of the project: each message gives the value, the rule it breaks and the remedy.

Every class keeps its constructor arguments in ``args``, so that an error crosses process boundaries
(pickle, Ray) unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import ClassVar


class HybridEngineError(Exception):
    """Root of all errors that this project raises on purpose."""

    exit_status: ClassVar[int] = 1
    """Exit status of a command that ends with this error: 1 if the run failed, 2 for bad input."""


class ConfigError(HybridEngineError):
    """A run configuration, or a file it names, breaks a rule."""

    exit_status = 2


class UnknownNameError(ConfigError, AttributeError):
    """An attribute that is made from names, such as a role or a method of a group, does not exist."""


class TopologyError(HybridEngineError):
    """Parallel sizes, ranks or coordinates do not fit together."""

    exit_status = 2


class PlanError(HybridEngineError):
    """Two layouts cannot be turned into each other, or a plan no longer describes the weights."""


class TransferError(HybridEngineError):
    """Moving bytes between ranks failed; says which operation, bucket and ranks."""


class StorageError(HybridEngineError):
    """Weights were used in a mode in which they own no memory."""


class CheckpointError(HybridEngineError):
    """A checkpoint is missing, truncated, or disagrees with its own configuration."""

    exit_status = 2


class DataError(HybridEngineError):
    """A prompt file, tokenizer or reward function cannot be used."""

    exit_status = 2


class UnreadableError(DataError):
    """A file cannot be read, or a text is not JSON."""


class DriftError(HybridEngineError):
    """Engine and trainer disagree about the log-probs of the same tokens."""


class OutputError(HybridEngineError):
    """A run's output cannot be written: the disk is full, or gone."""


class ProtocolError(HybridEngineError):
    """Rows cannot be split over, or collected from, the ranks of a worker group."""


class WrongArgumentsError(ProtocolError, TypeError):
    """A worker method was called with other arguments than it takes."""


class WorkerError(HybridEngineError):
    """A worker method failed; names role, method, rank, coordinate and node."""


class WorkerTimeoutError(WorkerError):
    """A group call did not end in time; names the operation and the ranks that have not answered."""


def raise_all(problems: Iterable[str], error: type[HybridEngineError] = ConfigError) -> None:
    """Raise one `error` that lists every problem; do nothing where there is none."""
    found = list(dict.fromkeys(problems))
    if not found:
        return
    if len(found) == 1:
        raise error(found[0])
    listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(found, start=1))
    raise error(f"{len(found)} problems:\n{listing}")


def shown(value: object) -> str:
    """Return `value` as JSON, shortened, for a message."""
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # of str(), which writes 4300 digits of an integer
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
