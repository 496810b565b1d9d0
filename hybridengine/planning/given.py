"""What a run would take with the ranks, pools and sizes that its configuration has."""

from __future__ import annotations

from dataclasses import replace

from hybridengine.config import RunConfig, model_holders
from hybridengine.errors import TopologyError
from hybridengine.planning.clusters import Cluster
from hybridengine.planning.iteration import Sharing, schedule_of
from hybridengine.planning.option import Option
from hybridengine.planning.options import Options
from hybridengine.planning.passes import compute_of
from hybridengine.planning.plan import Plan, PoolPlan
from hybridengine.planning.switch_cost import SwitchPricer
from hybridengine.planning.workload import Workload


def given_plan(
    config: RunConfig, workload: Workload, cluster: Cluster, pricer: SwitchPricer | None = None
) -> Plan:
    """The plan that `config` is, whether it fits or not.

    Args:
        pricer: what knows the run's switches already.

    Raises:
        TopologyError: generation sizes that do not nest, which the planner has no costs for.
    """
    options = Options(
        workload,
        cluster,
        {holder.name: holder.sizes for holder in model_holders(config)},
        config.actor.gen_sizes,
        pricer,
    )
    process_bytes = compute_of(cluster).process_bytes or 0
    pools, placement = [], []
    for pool in config.pools.values():
        names = tuple(name for role in pool.roles for name in workload.roles.get(role, ()))
        if names or not pools:
            found = [_option(config, options, name, pool.num_ranks) for name in names]
            pools.append(_pool_plan(config, found, pool.num_ranks, process_bytes))
            placement.append(names)
    num_ranks = [pool.num_ranks for pool in pools]
    schedule = schedule_of(workload, compute_of(cluster), tuple(placement), num_ranks)
    seconds = {option.model: option.least_seconds for pool in pools for option in pool.options}
    bars = schedule.bars(seconds, Sharing.of(cluster, num_ranks))
    return Plan(tuple(placement), tuple(pools), tuple(bars), cluster.device_memory_bytes)


def _option(config: RunConfig, options: Options, name: str, num_ranks: int) -> Option:
    found = options.of(name, num_ranks)
    if not found:
        raise TopologyError(
            f"{name} at {config.actor.parallel} with actor.generate={config.actor.generate} on {num_ranks} ranks has no"
            " costs: the planner knows generation sizes that nest (p_g | p, t_g | t) and tensor shards on one node;"
            " choose such sizes"
        )
    option = options.planned(found[0])
    if option.engine is None:
        return option
    kv_bytes = config.rollout.kv_cache_bytes
    option = options.generating_seconds(option, kv_bytes)
    assert option.engine is not None
    return replace(option, engine=replace(option.engine, kv_bytes=kv_bytes))


def _pool_plan(config: RunConfig, options: list[Option], num_ranks: int, process_bytes: int) -> PoolPlan:
    idle, kv_bytes = sum(option.memory.idle for option in options), 0
    peak = idle + max((option.extra_bytes() for option in options), default=0)
    for option in options:
        if (engine := option.engine) is not None:
            kv_bytes = engine.kv_bytes
            peak = max(peak, idle - option.memory.idle + engine.state_bytes + engine.gen_bytes + kv_bytes)
    return PoolPlan(num_ranks, tuple(options), kv_bytes, peak + process_bytes)
