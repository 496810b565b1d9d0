"""Settings of a run for a plan."""

from __future__ import annotations

from typing import Any

from hybridengine.config import RunConfig
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.workload import Workload
from hybridengine.planning.search.option import Option
from hybridengine.planning.search.plan import Plan, PoolPlan


def run_settings(config: RunConfig, plan: Plan, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """Return the explicitly set values of `config`, with the plan's ranks, pools and sizes."""
    values = config.model_dump(mode="json", exclude_unset=True)
    node = cluster.devices_per_node
    main, *others = plan.pools
    section = values.setdefault("cluster", {})
    section["ranks_per_node"] = _ranks_per_node(main, node)
    section.pop("pools", None)
    for pool in others:
        roles = list(dict.fromkeys(workload.model(option.model).role for option in pool.options))
        pools = section.setdefault("pools", {})
        pools["_".join(roles)] = {"roles": roles, "ranks_per_node": _ranks_per_node(pool, node)}
    for pool in plan.pools:
        for option in pool.options:
            _set_sizes(values, option, pool)
    return values


def _ranks_per_node(pool: PoolPlan, node: int) -> list[int]:
    whole, rest = divmod(pool.num_ranks, node)
    return [node] * whole + ([rest] if rest else [])


def _set_sizes(values: dict[str, Any], option: Option, pool: PoolPlan) -> None:
    role, _, term = option.model.partition("_")
    is_term = role in ("reward", "cost") and term and option.model != "cost_critic"
    section = values.setdefault(role if is_term else option.model, {})
    if is_term:
        section = section["terms"][term]
    section["parallel"] = str(option.sizes)
    if option.engine is not None:
        section["generate"] = str(option.engine.sizes)
        values.setdefault("rollout", {})["kv_cache_bytes"] = pool.kv_bytes
