"""Plan of the ranks, pools and sizes in a run's configuration."""

from __future__ import annotations

from hybridengine.config import RunConfig, model_holders
from hybridengine.errors import TopologyError
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.passes import compute_of
from hybridengine.planning.costs.workload import Workload
from hybridengine.planning.search.iteration import schedule_of
from hybridengine.planning.search.option import Option
from hybridengine.planning.search.options import Options
from hybridengine.planning.search.plan import Plan
from hybridengine.planning.switch.switch_cost import SwitchPricer


def given_plan(
    config: RunConfig, workload: Workload, cluster: Cluster, pricer: SwitchPricer | None = None
) -> Plan:
    """Return the plan that `config` describes, whether it fits or not.

    Args:
        pricer: pricer of the run's switches; by default a new one.

    Raises:
        TopologyError: the generation sizes do not nest, so that the planner has no costs for them.
    """
    sizes = {holder.name: holder.sizes for holder in model_holders(config)}
    options = Options(workload, cluster, sizes, config.actor.generate, pricer)
    pools, placement, num_ranks = [], [], []
    for pool in config.pools.values():
        names = tuple(name for role in pool.roles for name in workload.roles.get(role, ()))
        if names or not pools:
            pools.append([_option(config, options, name, pool.num_ranks) for name in names])
            placement.append(names)
            num_ranks.append(pool.num_ranks)
    schedule = schedule_of(workload, compute_of(cluster), tuple(placement))
    return Plan.of(tuple(placement), pools, num_ranks, schedule, cluster)


def _option(config: RunConfig, options: Options, name: str, num_ranks: int) -> Option:
    found = options.of(name, num_ranks)
    if not found:
        raise TopologyError(
            f"{name} at {config.actor.parallel} with actor.generate={config.actor.generate} on {num_ranks} ranks has no"
            " costs: the planner knows generation sizes that nest (p_g | p, t_g | t) and tensor shards on one node;"
            " choose such sizes"
        )
    option = options.planned(found[0])
    return option if option.engine is None else options.with_cache(option, config.rollout.kv_cache_bytes)
