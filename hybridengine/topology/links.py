"""The link between two ranks: the device's own memory, the node's fabric, or the network between nodes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate

from hybridengine.errors import TopologyError


class LinkClass(str, Enum):
    """Kinds of links, fastest first."""

    SAME_DEVICE = "same_device"
    SAME_NODE = "same_node"
    BETWEEN_NODES = "between_nodes"


@dataclass(frozen=True)
class NodeMap:
    """Consecutive ranks on nodes, at least one on each, as launchers place them."""

    ranks_per_node: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks_per_node or min(self.ranks_per_node) < 1:
            raise TopologyError(
                f"ranks_per_node={list(self.ranks_per_node)} must name at least one rank on every node"
            )

    @classmethod
    def uniform(cls, num_ranks: int, ranks_per_node: int) -> NodeMap:
        """Return a map of `num_ranks` ranks on nodes of `ranks_per_node`; the last node may have fewer."""
        if num_ranks < 1 or ranks_per_node < 1:
            raise TopologyError(
                f"num_ranks={num_ranks} and ranks_per_node={ranks_per_node} must be positive integers"
            )
        full, rest = divmod(num_ranks, ranks_per_node)
        return cls((ranks_per_node,) * full + ((rest,) if rest else ()))

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.ranks_per_node))

    @property
    def num_ranks(self) -> int:
        return self._ends[-1]

    def node_of(self, rank: int) -> int:
        """Return the index of the rank's node; TopologyError if no node has this rank."""
        if not 0 <= rank < self.num_ranks:
            raise TopologyError(
                f"rank {rank} is on no node: the nodes have ranks 0 to {self.num_ranks - 1}; name more nodes"
            )
        return bisect_right(self._ends, rank)

    def link(self, one: int, other: int) -> LinkClass:
        """Return the link between two ranks; each rank is its own device."""
        if one == other:
            return LinkClass.SAME_DEVICE
        return LinkClass.SAME_NODE if self.node_of(one) == self.node_of(other) else LinkClass.BETWEEN_NODES
