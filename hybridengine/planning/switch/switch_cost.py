"""Costs of a switch on a whole cluster, computed from the plans of its distinct domains.

Training replicas and tensor shards repeat each other, so that most domains differ only in the numbers of their ranks and
in the start of their boxes, which do not affect the cost. One plan is compiled for each set of equivalent domains.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from hybridengine.errors import PlanError
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.switch.switch_time import hosted_ranks, joined, line_rate_seconds, predict_seconds
from hybridengine.reshard.audit import audit, audit_return
from hybridengine.reshard.boxes import moved, starts
from hybridengine.reshard.cost import REMOTE, RankCost, Traffic, plan_traffic, rank_costs
from hybridengine.reshard.domains import domains
from hybridengine.reshard.layout import Layout, LocalParameter
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.plan import Plan
from hybridengine.reshard.planner import compile_plan, inverse_local, without_garbage_collection
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Groups
from hybridengine.topology.links import LinkClass, NodeMap

Pattern = tuple[Hashable, ...]
"""Properties of a domain, rank by rank, that determine its plan."""


@dataclass(frozen=True)
class Way:
    """Plan of one domain in one direction, with its costs."""

    plan: Plan
    nodes: NodeMap
    element_bytes: int

    @cached_property
    def costs(self) -> tuple[RankCost, ...]:
        """Costs of the ranks, in the order of the plan."""
        return tuple(rank_costs(self.plan, self.traffic, self.element_bytes).values())

    @cached_property
    def traffic(self) -> Traffic:
        return plan_traffic(self.plan, self.nodes)


@dataclass(frozen=True)
class DomainPlan:
    """Plans of one domain in both directions."""

    there: Way

    @cached_property
    def back(self) -> Way:
        return Way(inverse_local(self.there.plan), self.there.nodes, self.there.element_bytes)

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Findings of the audit of both directions; empty unless the planner has a bug."""
        return (*audit(self.there.plan), *audit_return(self.there.plan, self.back.plan))

    @property
    def num_moves(self) -> int:
        """Number of moves in both directions."""
        return sum(len(bucket.moves) for way in (self.there, self.back) for bucket in way.plan.buckets)


@dataclass(frozen=True)
class SwitchCost:
    """Figures of a switch to generation and back, from its plans; "max" is the largest value of any rank."""

    generation: GenerationGrid
    domains: tuple[tuple[DomainPlan, Groups], ...]
    """Distinct domains, each with the ranks of all equivalent domains, in the plan's order of ranks."""
    nodes: NodeMap
    element_bytes: int
    num_crossing_domains: int
    """Number of domains with ranks on more than one node."""
    received_bytes_max: int
    """Bytes received in the switch to generation."""
    received_bytes_max_by_link: dict[LinkClass, int]
    received_bytes_total_by_link: dict[LinkClass, int]
    """Bytes received by all ranks together."""
    copied_bytes_max: int
    """Bytes copied within the device in the switch to generation; the way back consists of such copies only."""
    copied_back_bytes_max: int
    train_shard_bytes_max: int
    gen_shard_bytes_max: int
    bucket_bytes_max: int
    """Bytes of destination and staging of the buckets in flight."""
    redundant_bytes_max: int
    """Bytes of training weights that stay in memory during generation."""
    extra_bytes_max: int
    """Bytes received in excess of nested layouts."""
    memory_bytes_there: tuple[int, ...]
    """Bytes of weights and staging on the rank with the highest peak, whenever a bucket opens or closes."""
    memory_bytes_back: tuple[int, ...]

    @classmethod
    def of(
        cls, generation: GenerationGrid, domains: tuple[tuple[DomainPlan, Groups], ...], nodes: NodeMap
    ) -> SwitchCost:
        """Return the cost of planned domains."""
        there = [cost for domain, _ in domains for cost in domain.there.costs]
        back = [cost for domain, _ in domains for cost in domain.back.costs]
        highest = max(zip(there, back, strict=True), key=lambda pair: max(cost.peak_bytes for cost in pair))

        def total(link: LinkClass) -> int:
            return sum(
                len(repeats) * cost.received_by_link[link]
                for domain, repeats in domains
                for cost in domain.there.costs
            )

        return cls(
            generation=generation,
            domains=domains,
            nodes=nodes,
            element_bytes=domains[0][0].there.element_bytes,
            num_crossing_domains=sum(
                len({nodes.node_of(rank) for rank in ranks}) > 1
                for _, repeats in domains
                for ranks in repeats
            ),
            received_bytes_max=max(cost.received_bytes for cost in there),
            received_bytes_max_by_link={
                link: max(cost.received_by_link[link] for cost in there) for link in REMOTE
            },
            received_bytes_total_by_link={link: total(link) for link in REMOTE},
            copied_bytes_max=max(cost.copied_bytes for cost in there),
            copied_back_bytes_max=max(cost.copied_bytes for cost in back),
            train_shard_bytes_max=max(cost.source_bytes for cost in there),
            gen_shard_bytes_max=max(cost.destination_bytes for cost in there),
            bucket_bytes_max=max(cost.bucket_bytes for cost in there),
            redundant_bytes_max=max(cost.redundant_bytes for cost in there),
            extra_bytes_max=max(cost.extra_bytes for cost in there),
            memory_bytes_there=highest[0].memory_bytes,
            memory_bytes_back=highest[1].memory_bytes,
        )

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(domain.there.plan for domain, _ in self.domains)

    @property
    def groups(self) -> Groups:
        """Gather domains (groups of ranks among which weights move), in the order of their first ranks."""
        return tuple(sorted(ranks for _, repeats in self.domains for ranks in repeats))

    @property
    def num_steps(self) -> int:
        """2 if each box is sent to a node once and then forwarded within the node, otherwise 1."""
        return max(plan.num_steps for plan in self.plans)

    @property
    def peak_weight_bytes_max(self) -> int:
        """Peak bytes of weights and staging in either direction."""
        return max(*self.memory_bytes_there, *self.memory_bytes_back)

    def check(self) -> int:
        """Audit the plans of the distinct domains, and return the number of their moves in both directions.

        Raises:
            PlanError: a plan is wrong.
        """
        for domain, _ in self.domains:
            if domain.problems:
                raise PlanError(
                    f"the plan {domain.there.plan} is wrong ({len(domain.problems)} problems, first:"
                    f" {domain.problems[0]}); this is an error of hybridengine: report it with this command"
                )
        return sum(domain.num_moves for domain, _ in self.domains)

    def seconds_there(self, cluster: Cluster) -> float:
        """Return the predicted seconds to generation on `cluster`."""
        return predict_seconds(self._there, self._hosts_RN, cluster, self.element_bytes)

    def seconds_back(self, cluster: Cluster) -> float:
        """Return the predicted seconds back to training on `cluster`."""
        back = joined([domain.back.traffic for domain, _ in self.domains])
        return predict_seconds(back, self._hosts_RN, cluster, self.element_bytes)

    def line_rate_seconds(self, cluster: Cluster) -> float:
        """Return the seconds of the busiest link for its bytes in the switch to generation: a lower bound of
        `seconds_there` for any bucketing."""
        return line_rate_seconds(self._there, self._hosts_RN, cluster, self.element_bytes)

    @cached_property
    def _there(self) -> Traffic:
        return joined([domain.there.traffic for domain, _ in self.domains])

    @cached_property
    def _hosts_RN(self) -> np.ndarray:
        return hosted_ranks([repeats for _, repeats in self.domains], self.nodes)


MOST_PRICED = 2
"""Number of costs that a pricer caches; the plans of large models on many ranks take a hundred MB."""


class SwitchPricer:
    """Computes the costs of switches of one model.

    Args:
        bucket_bytes: bytes of weights in flight at once.
    """

    def __init__(self, shape: ModelShape, dtype: str, bucket_bytes: int) -> None:
        self.shape, self.dtype, self.bucket_bytes = shape, dtype, bucket_bytes
        self._kept = lru_cache(MOST_PRICED)(self._price)

    def price(self, generation: GenerationGrid, nodes: NodeMap, two_step: bool = True) -> SwitchCost:
        """Return the cost of switching to `generation` and back.

        Args:
            two_step: send each box to a node once and forward it within the node.

        Raises:
            PlanError: the engines cannot hold the model, or a domain lacks part of it.
        """
        return self._kept(generation, nodes, two_step)

    def _price(self, generation: GenerationGrid, nodes: NodeMap, two_step: bool) -> SwitchCost:
        source = megatron_layout(self.shape, generation.train)
        destination = vllm_layout(self.shape, generation)
        element_bytes = DTYPE_BYTES[self.dtype]
        found = []
        for ranks, *others in distinct_domains(source, destination, nodes):
            bucket_elements = self.bucket_bytes // element_bytes
            plan = compile_plan(source, destination, ranks, bucket_elements, nodes=nodes, two_step=two_step)
            found.append((DomainPlan(Way(plan, nodes, element_bytes)), (ranks, *others)))
        return SwitchCost.of(generation, tuple(found), nodes)


def distinct_domains(source: Layout, destination: Layout, nodes: NodeMap) -> list[Groups]:
    """Return the domains, grouped by plans that differ only in ranks and in the start of boxes."""
    by_shards: dict[Pattern, list[tuple[int, ...]]] = {}
    for ranks in domains(source, destination):
        first_seen: dict[int, int] = {}
        on_nodes = tuple(first_seen.setdefault(nodes.node_of(rank), len(first_seen)) for rank in ranks)
        keys = tuple((source.keys[rank], destination.keys[rank]) for rank in ranks)
        by_shards.setdefault((keys, on_nodes), []).append(ranks)
    found: dict[Pattern, list[tuple[int, ...]]] = {}
    with without_garbage_collection():
        for (_, on_nodes), repeats in by_shards.items():
            pattern = (_contents(source, destination, repeats[0]), on_nodes)
            found.setdefault(pattern, []).extend(repeats)
    return [tuple(repeats) for repeats in found.values()]


def _contents(source: Layout, destination: Layout, ranks: tuple[int, ...]) -> Pattern:
    """Return every parameter of every distinct shard with its pieces, and the index of each rank's shards.

    Boxes of each logical tensor are relative to their smallest corner.

    Equal contents have equal plans, because the planner uses only the overlaps of boxes, their sizes and their places in
    the parameters.
    """
    shards = [layout.shard(rank) for layout in (source, destination) for rank in ranks]
    places: dict[int, int] = {}  # index of each distinct shard
    for shard in shards:
        places.setdefault(id(shard), len(places))
    distinct = list({id(shard): shard for shard in shards}.values())
    origin: dict[str, tuple[int, ...]] = {}
    for shard in distinct:
        for parameter in shard.parameters:
            for piece in parameter.pieces:
                corner = starts(piece.box)
                origin[piece.tensor] = tuple(map(min, corner, origin.get(piece.tensor, corner)))
    zero = {tensor: (0,) * len(corner) for tensor, corner in origin.items()}

    def content(parameter: LocalParameter) -> Hashable:
        relative = tuple(
            (piece.tensor, moved(piece.box, origin[piece.tensor], zero[piece.tensor]), piece.offset)
            for piece in parameter.pieces
        )
        return parameter.name, parameter.shape, relative

    contents = tuple(tuple(content(parameter) for parameter in shard.parameters) for shard in distinct)
    return contents, tuple(places[id(shard)] for shard in shards)
