"""Nodes that a run needs, from its configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from hybridengine.config import RunConfig, load_config
from hybridengine.errors import ConfigError, shown
from hybridengine.topology.nodes import order_pools, rooms_left

CPUS_PER_GPU_RANK = 4
RESUME = "resume=auto"
"""What launched runs are started with, so that a later attempt continues the earlier one."""


@dataclass(frozen=True)
class Shape:
    """Nodes of a run and what each of them needs."""

    ranks: tuple[int, ...]
    """Ranks of all pools on each node, most first."""
    num_gpus: int
    """GPUs of a node that the scheduler is asked for; 0 for runs on CPUs."""
    rooms: tuple[int, ...]
    """Number of ranks for which each node needs room, so that pools fit in whatever order the nodes come."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.ranks)

    @property
    def most_ranks(self) -> int:
        """Largest number of ranks on a node."""
        return self.ranks[0]

    @property
    def default_cpus(self) -> int:
        """CPUs of a node that a scheduler is asked for if their number is not given."""
        return self.most_ranks * (CPUS_PER_GPU_RANK if self.num_gpus else 1)

    def __str__(self) -> str:
        uneven = min(self.ranks) < self.most_ranks
        ranks = ", ".join(map(str, self.ranks)) if uneven else str(self.most_ranks)
        device = f", {self.num_gpus} GPUs each" if self.num_gpus else ", no GPUs"
        return f"{self.num_nodes} node(s) with {ranks} ranks{device}"


def shape_of(config: RunConfig, gpus_per_node: int | None = None, cpus_per_node: int | None = None) -> Shape:
    """Return the fewest nodes on which all pools find room, placed as a run places them.

    A node has room for `gpus_per_node` ranks, by default for the most ranks that a pool has on one node.

    Raises:
        ConfigError: a pool has more ranks on a node than it has GPUs, or a node more than `cpus_per_node`, or
            `gpus_per_node` is given to a run on CPUs.
    """
    pools = {name: tuple(pool.ranks_per_node) for name, pool in config.pools.items()}
    started = list(config.started_pools.values())
    if gpus_per_node and config.cluster.device == "cpu":
        raise ConfigError(
            f"--gpus-per-node {gpus_per_node} does not go with cluster.device=cpu, whose ranks need no GPUs; leave one of"
            " them out"
        )
    room = gpus_per_node or max(max(ranks) for ranks in pools.values())
    for name, ranks in pools.items():
        if max(ranks) > room:
            raise ConfigError(
                f"pool {name!r} has {max(ranks)} ranks on a node, and --gpus-per-node {room} allows {room}; choose"
                " smaller numbers in ranks_per_node, or nodes with more GPUs"
            )
    uses_gpus = config.cluster.device == "cuda" or bool(gpus_per_node)
    ranks = ranks_on_nodes(started, room)
    shape = Shape(ranks, room if uses_gpus else 0, rooms_of(started, ranks))
    if cpus_per_node and cpus_per_node < shape.most_ranks:
        raise ConfigError(
            f"--cpus-per-node {cpus_per_node} is too small for {shape.most_ranks} ranks on a node, each of which takes"
            f" one; give {shape.most_ranks} or more"
        )
    return shape


def ranks_on_nodes(sizes: Sequence[Sequence[int]], room: int) -> tuple[int, ...]:
    """Return the ranks on each of the fewest nodes with `room` for ranks on which all pools fit, most first.

    Pools are given as ranks per node.
    """
    fewest = max(max(map(len, sizes)), -(-sum(map(sum, sizes)) // room))
    for num_nodes in range(fewest, sum(map(len, sizes)) + 1):
        rooms = [room] * num_nodes
        left = rooms_left(sizes, rooms, order_pools(sizes, rooms))
        if left is not None:
            return tuple(sorted((room - free for free in left if free < room), reverse=True))
    raise AssertionError("every pool fits on nodes of its own")


def rooms_of(sizes: Sequence[Sequence[int]], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of ranks for which each node needs room, so that pools fit in whatever order the nodes come.

    A pool alone does so on nodes with its numbers of ranks, as its largest ones choose first; several do on equal nodes.
    """
    return ranks if len(sizes) == 1 else (ranks[0],) * len(ranks)


def launched_config(path: str, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a run that is launched; files that only its nodes have may be missing here.

    Raises:
        ConfigError: the configuration is invalid, or sets what a launch sets.
    """
    for text in overrides:
        key, _, value = text.partition("=")
        if key == "cluster.address":
            raise ConfigError(f"{shown(text)}: a launch starts the cluster that the run joins; leave it out")
        if key == "resume" and value != "auto":
            raise ConfigError(
                f"{shown(text)}: a launched run has resume=auto, so that a new attempt continues the earlier one; leave"
                " it out, or start from another checkpoint with hybridengine train"
            )
    return load_config(path, overrides, dry_run=True)


def train_arguments(path: str, overrides: Sequence[str], address: str) -> list[str]:
    """Return the arguments of the command that carries out a launched run on the cluster at `address`."""
    given = [text for text in overrides if text != RESUME]
    value = json.dumps(address) if address.startswith("[") else address  # else YAML takes brackets for a list
    return ["train", path, *given, RESUME, f"cluster.address={value}"]


def number_of_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
