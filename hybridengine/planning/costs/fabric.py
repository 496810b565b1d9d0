"""Seconds of collectives and messages between the ranks of a grid, computed from the links of a cluster.

All groups of a grid communicate at the same time, and groups with members on the same node share its bandwidth.
Collectives are rings, like those of gloo and NCCL for large messages: each rank receives (g - 1) / g of the result, and
a ring enters a node once. Bytes are numbers, or arrays with one element per message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridengine.planning.costs.clusters import Cluster


@dataclass(frozen=True)
class Axis:
    """Groups of a grid along one axis, each with `size` ranks at a distance of `stride`."""

    size: int
    stride: int


@dataclass(frozen=True)
class Fabric:
    """Links of `num_ranks` consecutive ranks of a cluster, with one rank per device."""

    cluster: Cluster
    num_ranks: int

    @property
    def node_ranks(self) -> int:
        """Number of ranks on a full node."""
        return min(self.cluster.devices_per_node, self.num_ranks)

    def members_per_node(self, axis: Axis) -> int:
        """Return the number of ranks of one group on a node."""
        return max(1, min(axis.size, self.node_ranks // axis.stride))

    def all_gather_s(self, num_bytes: Any, axis: Axis) -> Any:
        """Return the seconds of an all-gather with a result of `num_bytes`."""
        if axis.size == 1:
            return 0.0
        received = num_bytes * (axis.size - 1) / axis.size
        members = self.members_per_node(axis)
        nodes = -(-axis.size // members)
        inside, seconds, latency = self.cluster.links.same_node, 0.0, 0.0
        if members > 1:
            seconds = inside.seconds(received, received * self.node_ranks)
            latency = inside.latency_s * (members - 1) * nodes
        if nodes > 1:
            between = self.cluster.links.network
            rings = self.node_ranks / members
            seconds = np.maximum(seconds, between.seconds(received, received * rings))
            latency += between.latency_s * (nodes - 1)
        return seconds + latency

    def all_reduce_s(self, num_bytes: Any, axis: Axis) -> Any:
        """Return the seconds of an all-reduce of `num_bytes`, which is that of two all-gathers."""
        return 2 * self.all_gather_s(num_bytes, axis) + self._others_s if axis.size > 1 else 0.0

    @property
    def _others_s(self) -> float:
        """Additional seconds of a collective or message in a pass."""
        return self.cluster.compute.collective_s if self.cluster.compute else 0.0

    def sends_s(self, num_bytes: Any, axis: Axis, count: int = 1) -> Any:
        """Return the seconds of the messages between a rank and its neighbours, in all groups at the same time.

        The result is that of the slowest rank: if several ranks of a group share a node, some have one neighbour on
        another node.

        Args:
            count: number of neighbours with which a rank exchanges a message; both directions of a link work at once.
        """
        if axis.size == 1:
            return 0.0
        num_sent, count = count, min(count, axis.size - 1)  # of two ranks, each has one neighbour
        members, links, inside, across = self.members_per_node(axis), self.cluster.links, 0.0, 0.0
        if members > 1:
            inside = links.same_node.seconds(num_bytes, num_bytes * self.node_ranks)
            inside += links.same_node.latency_s
        if axis.size > members:
            # Ranks whose neighbour is on the next node: the last `stride` ranks of a node.
            leaving = min(axis.stride, self.node_ranks)
            between = links.network
            across = between.seconds(num_bytes, num_bytes * leaving) + between.latency_s
        crossing = (count + 1) // 2 if members > 1 else count
        slowest_s = np.maximum(inside * count, across * crossing + inside * (count - crossing))
        return slowest_s + num_sent * self._others_s
