"""Placements of models in pools of ranks, possible sizes of pools, and constraints of both, checked before a search.

Placements are written as pools of roles, "actor,reference,reward | critic", or as one of

    colocate     every model on the same ranks (DeepSpeed-Chat)
    standalone   every model on separate ranks (OpenRLHF)
    split        actor and reference on some ranks, all other models on others (NeMo-Aligner)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridengine.errors import ConfigError, TopologyError, raise_all, shown
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.workload import Workload
from hybridengine.planning.search.layouts import check_layouts
from hybridengine.topology.sizes import GenSizes, TrainSizes, divisors

Placement = tuple[tuple[str, ...], ...]
"""Names of the roles, or of their models, in each pool; the actor's pool comes first."""
GENERATE = "generate"
"""Name with which to fix the engine's sizes."""


def placements(names: Sequence[str]) -> Iterator[Placement]:
    """Yield every partition of the models into pools once (HybridFlow, arXiv 2409.19256, section 6)."""
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
    """Return every assignment of `sizes` that uses all devices, [A, num_pools]; small pools fill whole nodes together."""
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


@dataclass(frozen=True)
class Constraints:
    """Conditions that every plan must meet."""

    sizes: Mapping[str, TrainSizes] = field(default_factory=dict)
    """(p, t, d) of models, by name."""
    gen_sizes: GenSizes | None = None
    placements: tuple[Placement, ...] | None = None
    """Allowed placements of roles in pools; None allows all."""

    @classmethod
    def of(
        cls, fixed: Sequence[str], placement: str | None, workload: Workload, num_devices: int
    ) -> Constraints:
        """Return the constraints given as NAME=SIZES texts and a placement; a ConfigError lists what is invalid."""
        sizes, gen = _fixed(fixed, workload)
        problems = []
        for name, one in sizes.items():
            if one.num_ranks > num_devices:
                problems.append(
                    f"--fix {name}={one} takes p·t·d = {one.num_ranks} ranks, and there are {num_devices} devices;"
                    " choose smaller sizes, or more nodes"
                )
            try:
                check_layouts(workload.model(name).shape, one, gen if name == "actor" else None)
            except TopologyError as error:
                problems.append(f"--fix {name}={one}: {error}")
        raise_all(problems)
        return cls(sizes, gen, None if placement is None else (_placement(placement, workload),))


def _fixed(texts: Sequence[str], workload: Workload) -> tuple[dict[str, TrainSizes], GenSizes | None]:
    names = [model.name for model in workload.models]
    sizes: dict[str, TrainSizes] = {}
    gen: GenSizes | None = None
    for text in texts:
        name, _, value = text.partition("=")
        if name in sizes or (gen and name == GENERATE) or name not in (*names, GENERATE):
            raise ConfigError(
                f"--fix {shown(text)} must be NAME=SIZES with one of {', '.join(names)} (p-t-d) or {GENERATE} (p_g-t_g),"
                " each name once; write for instance actor=1-8-16"
            )
        try:
            if name == GENERATE:
                gen = GenSizes.parse(value)
            else:
                sizes[name] = TrainSizes.parse(value)
        except TopologyError as error:
            raise ConfigError(f"--fix {shown(text)}: {error}") from None
    return sizes, gen


def _placement(text: str, workload: Workload) -> Placement:
    roles = tuple(workload.roles)
    if text == "colocate":
        pools = [roles]
    elif text == "standalone":
        pools = [(role,) for role in roles]
    elif text == "split":
        first = tuple(role for role in roles if role in ("actor", "reference"))
        pools = [first, tuple(role for role in roles if role not in first)]
    else:
        pools = [tuple(name.strip() for name in pool.split(",")) for pool in text.split("|")]
    if sorted(name for pool in pools for name in pool) != sorted(roles):
        raise ConfigError(
            f"--placement {shown(text)} must name each of {', '.join(roles)} once, or be one of colocate, standalone,"
            f" split; write for instance {'|'.join(roles)!r}, with commas between models that share ranks"
        )
    return tuple(sorted(filter(None, pools), key=lambda pool: "actor" not in pool))
