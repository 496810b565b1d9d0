"""A call of a worker's method as one rank gets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridengine.errors import WorkerError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments, with a `RowsRequest` in place of every batch."""


@dataclass(frozen=True)
class Call:
    """A call of a role's method on one rank."""

    role: str
    method: str
    timeout_s: float
    is_source: bool
    """Whether the protocol collects this rank's result."""
    num_rows: int | None = None
    """Rows that the method must return on source ranks; None where it returns none."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


class InputFailedError(WorkerError):
    """Rows that a call was given do not exist, because the call that should have produced them failed."""
