"""Figures of a rehearsal, without torch: what one rank held and sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind in one group, as one rank takes part in them."""

    group: str
    """Axes along which the ranks of the group differ."""
    num_ranks: int
    operation: str
    """Operator of torch.ops.c10d, or `all_gather_object`."""
    count: int
    num_bytes: int
    """Bytes of the larger side of each message: inputs of reductions and sends, outputs of gathers and receives."""


@dataclass(frozen=True)
class Held:
    """Bytes of a model on the rank."""

    weights_bytes: int
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    """Moments, and master weights that are not the model's own."""


@dataclass(frozen=True)
class Phase:
    """One call of the iteration, or a part of the start."""

    name: str
    begin_bytes: int
    """Bytes of all tensors on the device before it."""
    peak_bytes: int
    """Bytes at its fullest moment."""
    end_bytes: int
    traffic: tuple[Traffic, ...]
    rehearsal_s: float
    """Time that its rehearsal took, which says nothing of a run's."""
    num_rows: int = 0
    """Rows that the rank has in the call; 0 for a call without rows."""
    num_rehearsed: int = 0
    """Rows that were rehearsed."""
    copied_bytes: int = 0
    """Bytes of the copy that a save makes in host memory."""


@dataclass(frozen=True)
class RankRehearsal:
    """Figures of one rank."""

    rank: int
    coordinate: str
    held: dict[str, Held]
    """Model -> its bytes."""
    engine_weights_bytes: int
    kv_cache_bytes: int
    phases: tuple[Phase, ...]
    host_peak_bytes: int
    """Most memory of the process that rehearsed it."""
    rehearsal_s: float
