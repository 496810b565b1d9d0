"""The place of a rank with vLLM: the variables that a launcher sets, of a world whose name is unique on the machine."""

from __future__ import annotations

import os

import torch.distributed as dist


def take_place(rank: int) -> str:
    """Set the variables that a launcher sets for `rank` and vLLM reads; return the name of this world."""
    name: list[int | None] = [os.getpid()]
    dist.broadcast_object_list(name, src=0)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(name[0]),  # the world exists already: nobody connects to it
    }
    return f"test-{name[0]}"
