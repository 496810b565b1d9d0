"""Ranks that have vLLM: fresh processes for every generation grid, because vLLM's groups are those of a process."""

from __future__ import annotations

import os

import torch.distributed as dist

from hybridengine.backends.vllm import environment
from tests.gloo.ranks import ENVIRONMENT, RankLauncher


class VllmRankLauncher(RankLauncher):
    """As `RankLauncher`, from a forkserver that has imported vLLM and the workers as well."""

    def __init__(self) -> None:
        self._context = self._start(["tests.full.preload"], environment.ON_CPU | ENVIRONMENT)


def take_place(rank: int) -> str:
    """Set the variables that a launcher sets for `rank`, which vLLM reads; returns a name of this world."""
    name: list[int | None] = [os.getpid()]
    dist.broadcast_object_list(name, src=0)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(name[0]),  # the world exists: nobody connects to it
    }
    return f"test-{name[0]}"
