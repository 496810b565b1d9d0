"""Process groups by their ranks: roles with the same groups share them, and every rank creates all of them in order."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch.distributed as dist

from hybridengine.errors import TopologyError
from hybridengine.topology.grid import Groups


class ProcessGroups:
    """Registry of `torch.distributed` groups of one process.

    Creating a group is collective over the world: all ranks must ask for the same groups in the same order, which they
    do because they compute them from the same grids.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, groups: Groups) -> dist.ProcessGroup:
        """This rank's one of `groups`; all of them are created, by all ranks, where they do not exist yet.

        Raises:
            TopologyError: this rank is in none of them, or a group is not ascending.
        """
        own: dist.ProcessGroup | None = None
        rank = dist.get_rank()
        for ranks in groups:
            if list(ranks) != sorted(ranks):
                raise TopologyError(f"group {list(ranks)} must list its ranks in ascending order")
            if ranks not in self._groups:
                created = dist.new_group(list(ranks), timeout=self._timeout)
                self._groups[ranks] = cast(dist.ProcessGroup, created)  # for others than its members, a mark
            if rank in ranks:
                own = self._groups[ranks]
        if own is None:
            raise TopologyError(f"rank {rank} is in none of the groups {[list(ranks) for ranks in groups]}")
        return own

    def new(self, groups: Groups) -> dist.ProcessGroup:
        """This rank's one of `groups`, made for the caller alone, as often as it asks.

        For what may fail half-way and leave messages behind: nobody else's can be mistaken for them, and who makes it
        anew starts without them.

        Raises:
            TopologyError: as for `of`.
        """
        return ProcessGroups(self._timeout.total_seconds()).of(groups)


_of_process: list[ProcessGroups] = []


def process_groups(timeout_s: float) -> ProcessGroups:
    """The registry that all roles of this process share; made at the first call, whose timeout counts."""
    if not _of_process:
        _of_process.append(ProcessGroups(timeout_s))
    return _of_process[0]
