"""Process groups by their ranks: roles with equal groups share them, and every rank creates all of them in order.

Groups are connected when they are made. NCCL would do so in a group's first messages, in the middle of a step or switch:
when a cache has taken the memory that its buffers need, and where a bucket without messages for a rank leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybridengine.errors import TopologyError, TransferError
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
                    connect(self._groups[ranks])
            if rank in ranks:
                own = self._groups[ranks]
        if own is None:
            raise TopologyError(f"rank {rank} is in none of the groups {[list(ranks) for ranks in groups]}")
        return own

    def new(self, groups: Groups) -> dist.ProcessGroup:
        """Return this rank's group of `groups`, newly created for operations that may fail and leave messages behind."""
        return ProcessGroups(self._timeout.total_seconds()).of(groups)


def connect(group: dist.ProcessGroup) -> None:
    """Connect the ranks of a group, on the device of their tensors. Collective over the group.

    Raises TransferError if a rank does not come.
    """
    if group.size() == 1:
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        raise TransferError(
            f"not all ranks of {ranks} have come to connect their group: {error}; look for one that has failed before"
        ) from error


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store of a group, which its members share; once it is destroyed, that of the default world."""
    known = distributed_c10d._world.pg_map.get(group)
    return known[1] if known else distributed_c10d._get_default_store()


def join_group(
    store: dist.Store, name: str, ranks: Sequence[int], rank: int, timeout_s: float
) -> dist.ProcessGroup:
    """Return a group of processes from several torch.distributed worlds. Collective over `ranks`.

    Args:
        store: a store that all of them reach.
        name: unique among the groups of each process.
        ranks: ascending numbers of the members, which are their ranks in calls on this group; `rank` is the own one.
    """
    place = list(ranks).index(rank)
    # torch.distributed.new_group divides the default world; this is what it calls for each group.
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        place,
        [],
        distributed_c10d._world.pg_map[distributed_c10d._get_default_group()][0],
        dist.PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=timedelta(seconds=timeout_s),
    )
    assert isinstance(group, dist.ProcessGroup), "only a process outside of the group gets a marker instead"
    distributed_c10d._world.pg_group_ranks[group] = {member: index for index, member in enumerate(ranks)}
    connect(group)
    return group


@cache
def process_groups(timeout_s: float, /) -> ProcessGroups:
    """Return the registry shared by all roles of this process that have the same timeout."""
    return ProcessGroups(timeout_s)
