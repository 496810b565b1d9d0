"""Placements: which models share a pool of ranks, and how many ranks each pool can have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from hybridengine.planning.costs.clusters import Cluster
from hybridengine.topology.sizes import divisors

Placement = tuple[tuple[str, ...], ...]
"""Names of the roles, or of their models, of each pool; the pool of the first, the actor's, comes first."""


def placements(names: Sequence[str]) -> Iterator[Placement]:
    """Yield every partition of the models into pools, once: 15 for four models.

    Source: HybridFlow, arXiv 2409.19256, section 6: the Bell number of the models.
    """
    if not names:
        yield ()
        return
    first, *others = names
    for rest in placements(others):
        yield ((first,), *rest)
        for place, pool in enumerate(rest):
            yield ((first, *pool), *rest[:place], *rest[place + 1 :])


def pool_sizes(cluster: Cluster, num_devices: int) -> tuple[int, ...]:
    """Return the ranks that a pool can have: parts of a node that divide it, and whole nodes."""
    node = cluster.devices_per_node
    parts = [size for size in divisors(node) if size < node]
    return tuple(size for size in [*parts, *range(node, num_devices + 1, node)] if size <= num_devices)


def allocations(sizes: Sequence[int], num_pools: int, num_devices: int, node: int) -> np.ndarray:
    """Return every way to give each pool one of `sizes`, all devices shared out, as [A, num_pools].

    Pools that are parts of nodes fill whole nodes together, so that no pool lies across two nodes for less than one.
    """
    ordered, known, least = sorted(sizes), set(sizes), min(sizes)

    def shares(pools: int, devices: int) -> Iterator[tuple[int, ...]]:
        if pools == 1 and devices in known:
            yield (devices,)
        elif pools > 1:
            for size in itertools.takewhile(lambda size: size + (pools - 1) * least <= devices, ordered):
                for others in shares(pools - 1, devices - size):
                    yield (size, *others)

    found = [
        one
        for one in shares(num_pools, num_devices)
        if num_devices < node or sum(size for size in one if size < node) % node == 0
    ]
    return np.array(found, dtype=np.int64).reshape(-1, num_pools)
