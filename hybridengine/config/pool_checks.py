"""Rules of pools: every role is on one, and its sizes fit the ranks there."""

from __future__ import annotations

from collections.abc import Iterator

from hybridengine.config.algorithm import Role
from hybridengine.config.conflicts import Conflict
from hybridengine.config.run_config import RunConfig, ranks_key
from hybridengine.config.sections import MAIN_POOL
from hybridengine.topology.sizes import TrainSizes


def pool_conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Roles that are on no pool, on two, or that nobody uses."""
    used, taken = config.algorithm.roles, dict[Role, str]()
    for name, pool in config.cluster.pools.items():
        key = f"cluster.pools.{name}.roles"
        if not pool.roles:
            free = [role for role in used if role != "actor"]
            yield Conflict(
                f"{key}=[] names no role; choose from {', '.join(free)}, or leave the pool out", (key,)
            )
        for role in pool.roles:
            if role == "actor":
                yield Conflict(
                    f"{key} names the actor, whose ranks are cluster.ranks_per_node; move the other roles to pools"
                    " instead",
                    (key,),
                )
            elif role not in used:
                yield Conflict(
                    f"{key} names {role}, which algorithm.name={config.algorithm.name} does not use; leave it out (its"
                    f" roles are {', '.join(used)})",
                    (key, "algorithm.name"),
                )
            elif role in taken:
                where = "twice" if taken[role] == name else f"and so does cluster.pools.{taken[role]}"
                yield Conflict(
                    f"{key} names {role}, {where}; a role is on one pool, leave one of them out",
                    (key, f"cluster.pools.{taken[role]}.roles"),
                )
            taken.setdefault(role, name)


def size_conflicts(config: RunConfig, role: Role, sizes: TrainSizes, key: str) -> Iterator[Conflict]:
    """p·t·d of a model against the ranks of its role's pool.

    Args:
        key: where the sizes come from.
    """
    name = config.pool_of(role)
    pool = config.pools[name]
    if sizes.num_ranks == pool.num_ranks:
        return
    pool_key = ranks_key(name)
    product = f"{sizes.pp_size}·{sizes.tp_size}·{sizes.dp_size} = {sizes.num_ranks}"
    replicas, rest = divmod(pool.num_ranks, sizes.model_parallel_size)
    nearest = f"{sizes.pp_size}-{sizes.tp_size}-{replicas}" if not rest else "other sizes"
    inherited = name != MAIN_POOL and key == "actor.parallel"
    remedy = f"give {role} sizes of its own, {nearest}," if inherited else f"choose {nearest},"
    yield Conflict(
        f"{key}={sizes} takes p·t·d = {product} ranks, which must equal the {pool.num_ranks} of"
        f" {pool_key}={list(pool.ranks_per_node)}{f' that {role} is on' if inherited else ''}; {remedy} or give the"
        f" {'cluster' if name == MAIN_POOL else 'pool'} {sizes.num_ranks} ranks",
        (key, pool_key, *(("cluster.pools",) if inherited else ())),
    )
