"""Choice of nodes for pools, given as ranks per node; the controller and the launchers place by the same rules."""

from __future__ import annotations

from collections.abc import Sequence


def choose_nodes(ranks_per_node: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """Return a distinct node for each entry of `ranks_per_node`, the earliest with enough room; None if they do not fit.

    `rooms[n]` is the number of ranks that fit on node n, in node order. The largest entries choose first.
    """
    chosen, taken = [0] * len(ranks_per_node), set[int]()
    for ranks in sorted(set(ranks_per_node), reverse=True):
        # Nodes are walked once for all entries of a size: thousands of entries have few sizes.
        free = (node for node, room in enumerate(rooms) if room >= ranks and node not in taken)
        for position in (place for place, wanted in enumerate(ranks_per_node) if wanted == ranks):
            node = next(free, None)
            if node is None:
                return None
            chosen[position] = node
            taken.add(node)
    return chosen


def order_pools(pools: Sequence[Sequence[int]], rooms: Sequence[int]) -> list[int]:
    """Return the order in which pools, given as ranks per node, should choose among nodes with `rooms`.

    The given order if all find room in it; otherwise pools with the most ranks on one node first, and of those the ones
    on the most nodes, if that fits.
    """
    as_given = list(range(len(pools)))
    for order in (as_given, sorted(as_given, key=lambda pool: (-max(pools[pool]), -len(pools[pool])))):
        if rooms_left(pools, rooms, order) is not None:
            return order
    return as_given


def rooms_left(
    pools: Sequence[Sequence[int]], rooms: Sequence[int], order: Sequence[int]
) -> list[int] | None:
    """Return the room that is left on each node when pools have chosen in this order; None if one does not fit."""
    left = list(rooms)
    for pool in order:
        nodes = choose_nodes(pools[pool], left)
        if nodes is None:
            return None
        for node, ranks in zip(nodes, pools[pool], strict=True):
            left[node] -= ranks
    return left
