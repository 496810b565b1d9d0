"""A `verifiers` taskset for tests that nobody scores."""

# pyright: reportMissingImports=false
# The clients' environment has the package, the project's does not.

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["UnscoredTasks"]


class Unscored(vf.Task[vf.TaskData]):
    """A question without a reward."""


class UnscoredTasks(vf.Taskset[Unscored, vf.TasksetConfig]):
    """One question."""

    def load(self) -> Iterator[Unscored]:
        """Yield it."""
        yield Unscored(vf.TaskData(prompt="1 + 1?"), self.config.task)
