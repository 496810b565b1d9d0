"""torch's fake process group in place of a run's world: its calls return at once, and no other rank exists."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.constants import default_pg_timeout
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridengine.rehearsal.replacing import all_replaced


@contextmanager
def rehearsed_world(
    rank: int, num_ranks: int, ranks_per_node: int, count: Callable[[dist.ProcessGroup, str, int], None]
) -> Iterator[None]:
    """Be one rank of a world of `num_ranks` while the context is open; every group is fake, whatever backend it names.

    In exchanges of objects, the other ranks have the object that this one has.

    Args:
        count: called with group, operation and bytes of each exchange of objects, which torch makes of real tensors.
    """
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nobody connects
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "LOCAL_WORLD_SIZE": str(min(num_ranks, ranks_per_node)),
    }
    new_group: Callable[..., Any] = dist.new_group

    @functools.wraps(new_group)
    def fake_group(*args: Any, **named: Any) -> Any:
        options = FakeProcessGroup.Options()  # pyright: ignore[reportCallIssue]
        options._timeout = named.get("timeout") or default_pg_timeout
        return new_group(*args, **{**named, "backend": "fake", "pg_options": options})

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        group = group or dist.group.WORLD
        count(group, "all_gather_object", group.size() * len(pickle.dumps(obj)))
        object_list[:] = [obj] * group.size()

    def broadcast_object_list(object_list: list[Any], *args: Any, group: Any = None, **named: Any) -> None:
        group = group or dist.group.WORLD
        count(group, "broadcast_object_list", len(pickle.dumps(object_list)))

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        with all_replaced(
            (dist, "new_group", fake_group),
            (dist, "all_gather_object", all_gather_object),
            (dist, "broadcast_object_list", broadcast_object_list),
        ):
            yield
    finally:
        dist.destroy_process_group()
