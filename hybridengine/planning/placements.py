"""Placements: which models share a pool of ranks, and how many ranks each pool can have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hybridengine.planning.clusters import Cluster
from hybridengine.topology.sizes import divisors

Placement = tuple[tuple[str, ...], ...]
"""Names of the roles, or of their models, of each pool; the pool of the first, the actor's, comes first."""


def placements(names: Sequence[str]) -> Iterator[Placement]:
    """Every partition of the models into pools, once: 15 for four models.

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
    """Ranks that a pool can have: parts of a node that divide it, and whole nodes."""
    node = cluster.devices_per_node
    parts = [size for size in divisors(node) if size < node]
    return tuple(size for size in [*parts, *range(node, num_devices + 1, node)] if size <= num_devices)


def allocations(sizes: Sequence[int], num_pools: int, num_devices: int, node: int) -> np.ndarray:
    """[A, num_pools]: every way to give each pool one of `sizes`, all devices shared out.

    Pools that are parts of nodes fill whole nodes together, so that no pool lies across two nodes for less than one.
    """
    found = [()]
    totals = [0]
    ordered = sorted(sizes)
    for left in range(num_pools - 1, -1, -1):
        extended, sums = [], []
        for one, total in zip(found, totals, strict=True):
            for size in ordered:
                rest = num_devices - total - size
                if rest < left * ordered[0] or (left == 0 and rest):
                    continue
                extended.append((*one, size))
                sums.append(total + size)
        found, totals = extended, sums
    whole = [
        one for one in found if sum(size for size in one if size < node) % node == 0 or num_devices < node
    ]
    return np.array(whole, dtype=np.int64).reshape(-1, num_pools)
