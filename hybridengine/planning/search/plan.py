"""Plan of a run: pools of ranks, models and their sizes, the timeline and memory of an iteration, and its configuration.

The ranks of a pool carry out its calls in the order in which the controller makes them; a call begins when its ranks are
free and the calls whose rows it reads have ended. Pools therefore work at the same time if the dataflow allows it.
The paper's cost, the sum over stages of the slowest pool's sum (HybridFlow, arXiv 2409.19256, appendix C), is the special
case in which every pool waits for all others between stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

from hybridengine.config import RunConfig, model_holders
from hybridengine.errors import TopologyError
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.costs.dataflows import Call
from hybridengine.planning.costs.passes import compute_of
from hybridengine.planning.costs.workload import Workload
from hybridengine.planning.search.options import Option, Options
from hybridengine.planning.search.placements import Placement
from hybridengine.planning.switch.switch_cost import SwitchPricer


@dataclass(frozen=True)
class Bar:
    """Call on the timeline."""

    call: Call
    pool: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Schedule:
    """Calls of an iteration on the pools of a placement; one without a model takes `call_s` on the first, the actor's."""

    def __init__(self, calls: Sequence[Call], placement: Placement, call_s: float) -> None:
        pool_of = {name: place for place, pool in enumerate(placement) for name in pool}
        self._calls, self._call_s = tuple(calls), call_s
        self._pools = [pool_of.get(call.role, 0) for call in calls]
        made = Counter[str]()
        self._steps: list[tuple[int, list[int], tuple[str, int] | None]] = []
        for call, pool in zip(calls, self._pools, strict=True):
            # It suffices to wait for the last call read on each other pool, since a pool's calls end in order.
            last = {self._pools[read]: read for read in sorted(call.reads) if self._pools[read] != pool}
            place = (call.role, made[call.role]) if call.role in pool_of else None
            made[call.role] += 1
            self._steps.append((pool, list(last.values()), place))

    def step_s(self, seconds: Mapping[str, Sequence[Any]], later: Callable[[Any, Any], Any] = max) -> Any:
        """Return the seconds of the iteration from those of each model's calls; for arrays, `later` is `np.maximum`."""
        return reduce(later, (end for _, end in self._spans(seconds, later)), 0.0)

    def bars(self, seconds: Mapping[str, Sequence[float]]) -> list[Bar]:
        """Return the timeline, in the order of the calls, from the seconds of each model's calls."""
        spans = self._spans(seconds, max)
        return [
            Bar(call, pool, float(begin), float(end))
            for call, pool, (begin, end) in zip(self._calls, self._pools, spans, strict=True)
        ]

    def _spans(
        self, seconds: Mapping[str, Sequence[Any]], later: Callable[[Any, Any], Any]
    ) -> list[tuple[Any, Any]]:
        """Return the begin and end of each call."""
        free: dict[int, Any] = dict.fromkeys(self._pools, 0.0)
        spans: list[tuple[Any, Any]] = []
        for pool, reads, place in self._steps:
            begin = free[pool]
            for read in reads:
                begin = later(begin, spans[read][1])
            free[pool] = begin + (self._call_s if place is None else seconds[place[0]][place[1]])
            spans.append((begin, free[pool]))
        return spans


def phases(bars: Sequence[Bar]) -> dict[str, float]:
    """Return the seconds of each phase, in order of first appearance."""
    found: dict[str, float] = {}
    for bar in bars:
        found[bar.call.phase] = found.get(bar.call.phase, 0.0) + bar.seconds
    return found


@dataclass(frozen=True)
class PoolPlan:
    """Pool of ranks, with the sizes of its models."""

    num_ranks: int
    options: tuple[Option, ...]
    process_bytes: int
    """Bytes of a rank's process without models."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache on a rank; 0 if the actor is in another pool."""
        return sum(option.engine.kv_bytes for option in self.options if option.engine)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on any rank, including its process."""
        idle = sum(option.memory.idle for option in self.options)
        peak = idle + max((option.extra_bytes for option in self.options), default=0)
        for engine in (option.engine for option in self.options if option.engine):
            generating = sum(option.memory.generating for option in self.options)
            peak = max(peak, generating + engine.gen_bytes + engine.switch.retained_bytes + engine.kv_bytes)
        return peak + self.process_bytes


@dataclass(frozen=True)
class Plan:
    """Placement, ranks and sizes of all models, and the resulting iteration."""

    placement: Placement
    pools: tuple[PoolPlan, ...]
    bars: tuple[Bar, ...]
    device_bytes: int

    @classmethod
    def of(
        cls,
        placement: Placement,
        options: Sequence[Sequence[Option]],
        num_ranks: Sequence[int],
        schedule: Schedule,
        cluster: Cluster,
    ) -> Plan:
        """Return the plan with the given options for the models of each pool, whether they fit or not."""
        pools = tuple(
            PoolPlan(ranks, tuple(own), cluster.process_bytes)
            for ranks, own in zip(num_ranks, options, strict=True)
        )
        bars = schedule.bars({option.model: option.least_seconds for own in options for option in own})
        return cls(placement, pools, tuple(bars), cluster.device_memory_bytes)

    @cached_property
    def step_s(self) -> float:
        return max(bar.end_s for bar in self.bars)

    @property
    def phases_s(self) -> Mapping[str, float]:
        return phases(self.bars)

    @property
    def headroom_bytes(self) -> int:
        """Free bytes on the fullest rank."""
        return self.device_bytes - max(pool.peak_bytes for pool in self.pools)

    def option(self, model: str) -> Option:
        return next(option for pool in self.pools for option in pool.options if option.model == model)


def idle_shares(plan: Plan) -> tuple[float, ...]:
    """Return, for each pool, the share of the step in which its ranks are idle."""
    busy = [sum(bar.seconds for bar in plan.bars if bar.pool == pool) for pool in range(len(plan.pools))]
    return tuple(1 - seconds / plan.step_s for seconds in busy)


def given_plan(
    config: RunConfig, workload: Workload, cluster: Cluster, pricer: SwitchPricer | None = None
) -> Plan:
    """Return the plan that `config` describes, fitting or not; a TopologyError if the generation sizes do not nest."""
    sizes = {holder.name: holder.sizes for holder in model_holders(config)}
    options = Options(workload, cluster, sizes, config.actor.generate, pricer)
    pools, placement, num_ranks = [], [], []
    for pool in config.pools.values():
        names = tuple(name for role in pool.roles for name in workload.roles.get(role, ()))
        if names or not pools:
            pools.append([_option(config, options, name, pool.num_ranks) for name in names])
            placement.append(names)
            num_ranks.append(pool.num_ranks)
    schedule = Schedule(workload.calls, tuple(placement), compute_of(cluster).call_s)
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


def run_settings(config: RunConfig, plan: Plan, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """Return the explicitly set values of `config`, with the plan's ranks, pools and sizes."""
    values = config.model_dump(mode="json", exclude_unset=True)
    section = values.setdefault("cluster", {})
    engines = {name: pool for name, pool in section.pop("pools", {}).items() if "generation" in pool["roles"]}
    if engines:
        section["pools"] = engines
    for place, pool in enumerate(plan.pools):
        whole, rest = divmod(pool.num_ranks, cluster.devices_per_node)
        ranks_per_node = [cluster.devices_per_node] * whole + ([rest] if rest else [])
        if place == 0:
            section["ranks_per_node"] = ranks_per_node
        else:
            roles = list(dict.fromkeys(workload.model(option.model).role for option in pool.options))
            pools = section.setdefault("pools", {})
            pools["_".join(roles)] = {"roles": roles, "ranks_per_node": ranks_per_node}
        for option in pool.options:
            _set_sizes(values, workload.model(option.model).role, option, pool)
    return values


def _set_sizes(values: dict[str, Any], role: str, option: Option, pool: PoolPlan) -> None:
    section = values.setdefault(role, {})
    if option.model != role:  # one of several terms, "reward_NAME"
        section = section["terms"][option.model.removeprefix(f"{role}_")]
    section["parallel"] = str(option.sizes)
    if option.engine is not None:
        section["generate"] = str(option.engine.sizes)
        values.setdefault("rollout", {})["kv_cache_bytes"] = pool.kv_bytes
