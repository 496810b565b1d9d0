"""Seconds of collectives and messages between the ranks of a grid, from the links of a cluster.

All groups of a grid do the same at the same time: those that have members on a node share what the node's links carry
together. Collectives are rings, as gloo's and NCCL's are for large messages: each rank receives (g - 1) / g of the
result, and a ring enters a node once. Bytes are numbers, or arrays for as many messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridengine.planning.costs.clusters import Cluster


@dataclass(frozen=True)
class Axis:
    """The groups of a grid along one axis: every `stride`-th rank, `size` of them."""

    size: int
    stride: int


@dataclass(frozen=True)
class Fabric:
    """The links that `num_ranks` consecutive ranks of a cluster have, one rank on each device."""

    cluster: Cluster
    num_ranks: int

    @property
    def node_ranks(self) -> int:
        """Ranks of a full node."""
        return min(self.cluster.devices_per_node, self.num_ranks)

    def members_per_node(self, axis: Axis) -> int:
        """Return the ranks of one group on a node."""
        return max(1, min(axis.size, self.node_ranks // axis.stride))

    def all_gather_s(self, num_bytes: Any, axis: Axis) -> Any:
        """Return the seconds until every rank of a group has the `num_bytes` of which each had its part."""
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
        """Return the seconds until every rank of a group has the sum of all `num_bytes`: two all-gathers."""
        return 2 * self.all_gather_s(num_bytes, axis) + self._others_s if axis.size > 1 else 0.0

    @property
    def _others_s(self) -> float:
        """Seconds of a collective or message of a pass beside what the links say."""
        return self.cluster.compute.collective_s if self.cluster.compute else 0.0

    def sends_s(self, num_bytes: Any, axis: Axis, count: int = 1) -> Any:
        """Return the seconds of the messages between a rank and its neighbours, in all groups at the same time.

        The slowest rank counts: where several of a group share a node, some have one neighbour on another one.

        Args:
            count: neighbours that it exchanges a message with; a link carries both directions at once.
        """
        if axis.size == 1:
            return 0.0
        num_sent, count = count, min(count, axis.size - 1)  # of two ranks, each has one neighbour
        members, links, inside, across = self.members_per_node(axis), self.cluster.links, 0.0, 0.0
        if members > 1:
            inside = links.same_node.seconds(num_bytes, num_bytes * self.node_ranks)
            inside += links.same_node.latency_s
        if axis.size > members:
            # Of the ranks next to the end of a node, as many as lie between neighbours of a group.
            leaving = min(axis.stride, self.node_ranks)
            between = links.network
            across = between.seconds(num_bytes, num_bytes * leaving) + between.latency_s
        crossing = (count + 1) // 2 if members > 1 else count
        slowest_s = np.maximum(inside * count, across * crossing + inside * (count - crossing))
        return slowest_s + num_sent * self._others_s
