"""Choice of nodes for pools, given as ranks per node; the controller and the launchers place by the same rules."""

from __future__ import annotations

from collections.abc import Sequence


def choose_nodes(ranks_per_node: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """Return a distinct node for each entry of `ranks_per_node`, the earliest with enough room; None if they do not fit.

    `rooms[n]` is the number of ranks that fit on node n, in node order. The largest entries choose first.
    """
    chosen = dict[int, int]()
    for position in sorted(range(len(ranks_per_node)), key=lambda index: -ranks_per_node[index]):
        fitting = (n for n, room in enumerate(rooms) if room >= ranks_per_node[position])
        node = next((n for n in fitting if n not in chosen.values()), None)
        if node is None:
            return None
        chosen[position] = node
    return [chosen[position] for position in range(len(ranks_per_node))]


def order_pools(pools: Sequence[Sequence[int]], rooms: Sequence[int]) -> list[int]:
    """Return the order in which pools, given as ranks per node, should choose among nodes with `rooms`.

    The given order if all find room in it; otherwise pools with the most ranks on one node first, if that fits.
    """
    as_given = list(range(len(pools)))
    for order in (as_given, sorted(as_given, key=lambda pool: -max(pools[pool]))):
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
