"""The planned switch of a layout on a cluster, as figures: bytes by link, memory over time, predicted seconds."""

from __future__ import annotations

from dataclasses import dataclass

from hybridengine.planning.clusters import Cluster
from hybridengine.planning.switch_cost import SwitchCost, SwitchPricer
from hybridengine.reshard.cost import REMOTE
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid, Groups, RankOrder
from hybridengine.topology.links import LinkClass


@dataclass(frozen=True)
class Variant:
    """What a way of doing the same switch sends over the links; "max" is the rank with the most."""

    num_crossing_domains: int
    """Gather domains with ranks on more than one node."""
    received_bytes_max: int
    received_bytes_max_by_link: dict[str, int]
    received_bytes_total_by_link: dict[str, int]
    """Of all ranks together."""
    seconds_there: float
    """Predicted, not measured."""
    line_rate_seconds: float
    """What the busiest link takes for its bytes: the least that `seconds_there` can be, however bytes are bucketed."""

    @property
    def inter_node_bytes_max(self) -> int:
        return self.received_bytes_max_by_link[LinkClass.BETWEEN_NODES.value]


@dataclass(frozen=True)
class SwitchPlan:
    """A switch to generation and back on a cluster; "max" is the rank with the most."""

    generation: GenerationGrid
    num_domains: int
    """Gather domains: the groups of ranks among which weights move."""
    domains: tuple[Groups, ...]
    """For each distinct domain, the ranks of all domains that repeat it."""
    num_buckets: int
    num_audited_moves: int
    """Moves of the distinct domains, there and back; all of them have passed the audit."""
    num_steps: int
    """2 where boxes enter a node once and are passed on inside it."""
    there: Variant
    copied_bytes_max: int
    """Moved inside the device on the way there; on the way back everything is."""
    copied_back_bytes_max: int
    train_shard_bytes_max: int
    gen_shard_bytes_max: int
    bucket_bytes_max: int
    """Buckets in flight, staging included."""
    peak_weight_bytes_max: int
    """At any moment of either way."""
    redundant_bytes_max: int
    """Held twice while generating."""
    extra_bytes_max: int
    """Received beyond what nested layouts would take."""
    memory_bytes_there: tuple[int, ...]
    """Weights and staging of the rank with the highest peak, whenever a bucket opens or closes."""
    memory_bytes_back: tuple[int, ...]
    seconds_back: float
    """Predicted, not measured."""
    orders: dict[str, Variant]
    """Rank order -> the same switch on ranks in that order."""
    one_step: Variant | None
    """Every rank fetches from the owner itself; None where two steps change nothing."""

    @property
    def seconds(self) -> float:
        """There and back."""
        return self.there.seconds_there + self.seconds_back


def plan_switch(
    pricer: SwitchPricer, generation: GenerationGrid, cluster: Cluster, with_variants: bool = True
) -> SwitchPlan:
    """Figures of switching to `generation` and back on `cluster`, from plans that have passed the audit.

    Args:
        with_variants: plan the other rank order, and the gather in one step, as well.

    Raises:
        ConfigError: the cluster has fewer devices than ranks, or no links that the switch needs.
        PlanError: the engines cannot hold the model; or a plan is wrong, which is an error of this project.
    """
    nodes = cluster.node_map(generation.train.num_ranks)
    cost = pricer.price(generation, nodes)
    there, back = cost.busiest_memory
    own = _variant(cost, cluster)
    orders = {generation.train.order.name.lower(): own}
    one_step = None
    if with_variants:
        for order in RankOrder:
            if order is not generation.train.order:
                other = GenerationGrid(
                    Grid(generation.train.sizes, order), generation.sizes, generation.grouping
                )
                orders[order.name.lower()] = _variant(pricer.price(other, nodes), cluster)
        if cost.num_steps > 1:
            one_step = _variant(pricer.price(generation, nodes, two_step=False), cluster)
    return SwitchPlan(
        generation=generation,
        num_domains=cost.num_domains,
        domains=tuple(repeats for _, repeats in cost.domains),
        num_buckets=max(len(plan.buckets) for plan in cost.plans),
        num_audited_moves=cost.check(),
        num_steps=cost.num_steps,
        there=own,
        copied_bytes_max=cost.copied_bytes,
        copied_back_bytes_max=cost.copied_back_bytes,
        train_shard_bytes_max=cost.train_bytes,
        gen_shard_bytes_max=cost.gen_bytes,
        bucket_bytes_max=cost.bucket_bytes,
        peak_weight_bytes_max=cost.peak_bytes,
        redundant_bytes_max=cost.redundant_bytes,
        extra_bytes_max=cost.extra_bytes,
        memory_bytes_there=there.memory_bytes,
        memory_bytes_back=back.memory_bytes,
        seconds_back=cost.seconds_back(cluster),
        orders=orders,
        one_step=one_step,
    )


def _variant(cost: SwitchCost, cluster: Cluster) -> Variant:
    return Variant(
        num_crossing_domains=cost.num_crossing_domains,
        received_bytes_max=cost.received_bytes,
        received_bytes_max_by_link={link.value: cost.received_over(link) for link in REMOTE},
        received_bytes_total_by_link={link.value: cost.total_over(link) for link in REMOTE},
        seconds_there=cost.seconds_there(cluster),
        line_rate_seconds=cost.line_rate_seconds(cluster),
    )
