"""The worker groups of a dataflow, and what an iteration samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridengine.controller.rows import Rows
from hybridengine.controller.worker_group import WorkerGroup


@dataclass(frozen=True)
class Roles:
    """Worker groups by role."""

    actor: WorkerGroup
    critic: WorkerGroup
    reference: WorkerGroup
    reward: WorkerGroup
    prompts: WorkerGroup
    """Reads the data files."""
    compute: WorkerGroup
    """Runs plain functions over rows."""


@dataclass(frozen=True)
class Sampling:
    """What one iteration samples."""

    step: int
    """From 1."""
    num_prompts: int
    samples_per_prompt: int
    first_seed: int
    """Of the first response; the others count on."""

    @property
    def prompts(self) -> Rows:
        """One row per prompt, still empty."""
        return Rows.numbered(self.num_prompts)


def function_path(function: Callable) -> str:
    """Import path of a function, for workers."""
    return f"{function.__module__}.{function.__qualname__}"
