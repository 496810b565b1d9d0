"""Process groups by their ranks: roles with equal groups share them, and every rank creates all of them in order."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import cast

import torch.distributed as dist

from hybridengine.errors import TopologyError
from hybridengine.topology.grid import Groups


class ProcessGroups:
    """Registry of `torch.distributed` groups of one process.

    Creating a group is collective over the world: all ranks request the same groups in the same order.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, groups: Groups) -> dist.ProcessGroup:
        """Return this rank's group of `groups`, all of which are created if they do not exist yet; TopologyError if this
        rank is in none of them, or a group is not ascending."""
        own: dist.ProcessGroup | None = None
        rank = dist.get_rank()
        for ranks in groups:
            if list(ranks) != sorted(ranks):
                raise TopologyError(f"group {list(ranks)} must list its ranks in ascending order")
            if ranks not in self._groups:
                created = dist.new_group(list(ranks), timeout=self._timeout)
                self._groups[ranks] = cast(dist.ProcessGroup, created)  # a marker for non-members
            if rank in ranks:
                own = self._groups[ranks]
        if own is None:
            raise TopologyError(f"rank {rank} is in none of the groups {[list(ranks) for ranks in groups]}")
        return own

    def new(self, groups: Groups) -> dist.ProcessGroup:
        """Return this rank's group of `groups`, newly created for operations that may fail and leave messages behind."""
        return ProcessGroups(self._timeout.total_seconds()).of(groups)


@cache
def process_groups(timeout_s: float, /) -> ProcessGroups:
    """Return the registry shared by all roles of this process that have the same timeout."""
    return ProcessGroups(timeout_s)
