"""Placements of models in pools of ranks, and the possible sizes of pools."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from hybridengine.planning.costs.clusters import Cluster
from hybridengine.topology.sizes import divisors

Placement = tuple[tuple[str, ...], ...]
"""Names of the roles, or of their models, in each pool; the actor's pool comes first."""


def placements(names: Sequence[str]) -> Iterator[Placement]:
    """Yield every partition of the models into pools once: 15 (a Bell number) for four models.

    Source: HybridFlow, arXiv 2409.19256, section 6.
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
    """Return the possible sizes of a pool: divisors of a node, and whole nodes."""
    node = cluster.devices_per_node
    parts = [size for size in divisors(node) if size < node]
    return tuple(size for size in [*parts, *range(node, num_devices + 1, node)] if size <= num_devices)


def allocations(sizes: Sequence[int], num_pools: int, num_devices: int, node: int) -> np.ndarray:
    """Return every assignment of `sizes` to pools that uses all devices, as [A, num_pools].

    Pools smaller than a node fill whole nodes together, so that none of them is split over two nodes.
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
