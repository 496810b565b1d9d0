"""Costs of a switch on a whole cluster, computed from the plans of its distinct domains.

Training replicas and tensor shards repeat each other, so that most domains differ only in the numbers of their ranks and
in the start of their boxes, which do not affect the cost. One plan is compiled for each set of equivalent domains.

Shapes: those of `reshard.cost`, with R ranks of all distinct domains, and N nodes that host different ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from hybridengine.errors import PlanError
from hybridengine.machine import without_garbage_collection
from hybridengine.models.shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.costs.clusters import Cluster
from hybridengine.planning.switch.switch_seconds import (
    hosted_ranks,
    joined,
    line_rate_seconds,
    predict_seconds,
)
from hybridengine.reshard.audit import audit, audit_return
from hybridengine.reshard.boxes import moved, starts
from hybridengine.reshard.compiler import compile_plan, inverse_local
from hybridengine.reshard.cost import REMOTE, RankCost, Traffic, plan_traffic, rank_costs
from hybridengine.reshard.domains import domains
from hybridengine.reshard.layout import Layout, LocalParameter
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.plan import Plan
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Groups
from hybridengine.topology.links import LinkClass, NodeMap
from hybridengine.topology.sizes import GenSizes, TrainSizes, divisors

Pattern = tuple[Hashable, ...]
"""Properties of a domain, rank by rank, that determine its plan."""


@dataclass(frozen=True)
class Way:
    plan: Plan
    nodes: NodeMap
    element_bytes: int

    @cached_property
    def costs(self) -> tuple[RankCost, ...]:
        return tuple(rank_costs(self.plan, self.traffic, self.element_bytes).values())

    @cached_property
    def traffic(self) -> Traffic:
        return plan_traffic(self.plan, self.nodes)


@dataclass(frozen=True)
class DomainPlan:
    there: Way

    @cached_property
    def back(self) -> Way:
        return Way(inverse_local(self.there.plan), self.there.nodes, self.there.element_bytes)


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
        there = [cost for domain, _ in domains for cost in domain.there.costs]
        back = [cost for domain, _ in domains for cost in domain.back.costs]
        repeats = [len(repeats) for domain, repeats in domains for _ in domain.there.costs]
        highest = max(zip(there, back, strict=True), key=lambda pair: max(cost.peak_bytes for cost in pair))
        received = {link: [cost.received_by_link[link] for cost in there] for link in REMOTE}
        return cls(
            generation=generation,
            domains=domains,
            nodes=nodes,
            element_bytes=domains[0][0].there.element_bytes,
            num_crossing_domains=sum(
                len(set(map(nodes.node_of, ranks))) > 1 for _, repeats in domains for ranks in repeats
            ),
            received_bytes_max=max(cost.received_bytes for cost in there),
            received_bytes_max_by_link={link: max(by_rank) for link, by_rank in received.items()},
            received_bytes_total_by_link={
                link: sum(map(operator.mul, repeats, by_rank)) for link, by_rank in received.items()
            },
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

    def of_rank(self, rank: int) -> tuple[RankCost, RankCost]:
        """Return the costs of a rank to generation and back."""
        for domain, repeats in self.domains:
            for ranks in repeats:
                if rank in ranks:
                    place = ranks.index(rank)
                    return domain.there.costs[place], domain.back.costs[place]
        raise LookupError(f"rank {rank} is in no domain; the grid has {self.generation.num_ranks} ranks")

    def check(self) -> int:
        """Return the number of moves of the distinct domains in both directions; a PlanError says which plan is wrong."""
        num_moves = 0
        for domain, _ in self.domains:
            there, back = domain.there.plan, domain.back.plan
            if problems := [*audit(there), *audit_return(there, back)]:
                raise PlanError(
                    f"the plan {there} is wrong ({len(problems)} problems, first: {problems[0]}); this is an error of"
                    " hybridengine: report it with this command"
                )
            num_moves += sum(len(bucket.moves) for plan in (there, back) for bucket in plan.buckets)
        return num_moves

    def seconds_there(self, cluster: Cluster) -> float:
        """Return the predicted seconds to generation."""
        return predict_seconds(self._there, self._hosts_RN, cluster, self.element_bytes)

    def seconds_back(self, cluster: Cluster) -> float:
        """Return the predicted seconds back to training."""
        return predict_seconds(self._back, self._hosts_RN, cluster, self.element_bytes)

    def line_rate_seconds(self, cluster: Cluster) -> float:
        """Return the seconds of the busiest link for its bytes: a lower bound of `seconds_there` for any bucketing."""
        return line_rate_seconds(self._there, self._hosts_RN, cluster, self.element_bytes)

    @cached_property
    def _there(self) -> Traffic:
        return joined([domain.there.traffic for domain, _ in self.domains])

    @cached_property
    def _back(self) -> Traffic:
        return joined([domain.back.traffic for domain, _ in self.domains])

    @cached_property
    def _hosts_RN(self) -> np.ndarray:
        return hosted_ranks([repeats for _, repeats in self.domains], self.nodes)


GROUPED_SHARE = 8
"""Experts are grouped up to matrices of this part of the bytes in flight; in coarser buckets less would overlap."""
MOST_PRICED = 2
"""Number of costs that a pricer caches; the plans of large models on many ranks take a hundred MB."""


def grouped_experts(
    shape: ModelShape, train: TrainSizes, gen: GenSizes, most_elements: int
) -> tuple[ModelShape, int]:
    """Return the shape with experts joined into groups that move alike, each as wide as all of them, and their number.

    A group's matrix has at most `most_elements`. All bytes but those of routers are the same, in fewer messages and
    coarser buckets: peaks differ by a percent at most, seconds by a third. Plans of 128 experts take many times as long.
    """
    if (experts := shape.experts) is None:
        return shape, 1
    parts = math.lcm(train.expert_parts, gen.expert_parts)
    together, one = experts.num_experts // parts, 2 * experts.ffn_hidden_size * shape.hidden_size
    count = max((size for size in divisors(together) if size * one <= most_elements), default=1)
    num_active = max(1, experts.num_active // count)
    wide = replace(
        experts,
        num_experts=experts.num_experts // count,
        num_active=num_active,
        ffn_hidden_size=experts.ffn_hidden_size * count,
    )
    return replace(shape, experts=wide), count


class SwitchPricer:
    """Computes the costs of switches of one model, with `bucket_bytes` of weights in flight at once.

    With `groups_experts`, experts that move alike are planned together (`grouped_experts`); a run moves each by itself.
    """

    def __init__(
        self, shape: ModelShape, dtype: str, bucket_bytes: int, *, groups_experts: bool = False
    ) -> None:
        self.shape, self.dtype, self.bucket_bytes = shape, dtype, bucket_bytes
        self._groups_experts = groups_experts
        self._kept = lru_cache(MOST_PRICED)(self._price)
        self._sizes: tuple[TrainSizes, GenSizes] | None = None
        self._domains: dict[tuple[Pattern, bool], DomainPlan] = {}
        """Plans of the latest sizes: other orders of ranks often have the same domains."""

    def price(self, generation: GenerationGrid, nodes: NodeMap, two_step: bool = True) -> SwitchCost:
        """Return the cost of switching to `generation` and back; a PlanError if the engines cannot hold the model."""
        return self._kept(generation, nodes, two_step)

    def grouped(self, generation: GenerationGrid) -> tuple[ModelShape, int]:
        """Return the shape whose switch is planned, and how many experts its groups have."""
        most = self.bucket_bytes // DTYPE_BYTES[self.dtype] // GROUPED_SHARE
        return grouped_experts(self.shape, generation.train.sizes, generation.sizes, most)

    def _price(self, generation: GenerationGrid, nodes: NodeMap, two_step: bool) -> SwitchCost:
        shape, element_bytes = self.shape, DTYPE_BYTES[self.dtype]
        if self._groups_experts:
            shape, _ = self.grouped(generation)
        layouts = megatron_layout(shape, generation.train), vllm_layout(shape, generation)
        sizes = generation.train.sizes, generation.sizes
        if sizes != self._sizes:
            self._sizes, self._domains = sizes, {}
        found = []
        for pattern, repeats in distinct_domains(*layouts, nodes).items():
            if (pattern, two_step) not in self._domains:
                bucket_elements = self.bucket_bytes // element_bytes
                plan = compile_plan(*layouts, repeats[0], bucket_elements, nodes=nodes, two_step=two_step)
                self._domains[pattern, two_step] = DomainPlan(Way(plan, nodes, element_bytes))
            found.append((self._domains[pattern, two_step], repeats))
        return SwitchCost.of(generation, tuple(found), nodes)


def distinct_domains(source: Layout, destination: Layout, nodes: NodeMap) -> dict[Pattern, Groups]:
    """Return pattern -> domains whose plans differ only in ranks and in the start of boxes."""
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
    return {pattern: tuple(repeats) for pattern, repeats in found.items()}


def _contents(source: Layout, destination: Layout, ranks: tuple[int, ...]) -> Pattern:
    """Return the parameters of all distinct shards, with boxes relative to their tensor's corner, and each rank's shards.

    Equal contents have equal plans: the planner uses only the overlaps of boxes, their sizes and places in parameters.
    """
    shards = [layout.shard(rank) for layout in (source, destination) for rank in ranks]
    distinct = list({id(shard): shard for shard in shards}.values())
    places = {id(shard): place for place, shard in enumerate(distinct)}
    origin: dict[str, tuple[int, ...]] = {}
    for shard in distinct:
        for parameter in shard.parameters:
            for piece in parameter.pieces:
                corner = starts(piece.box)
                origin[piece.tensor] = tuple(map(min, corner, origin.get(piece.tensor, corner)))

    def content(parameter: LocalParameter) -> Hashable:
        relative = []
        for piece in parameter.pieces:
            corner = origin[piece.tensor]
            relative.append((piece.tensor, moved(piece.box, corner, (0,) * len(corner)), piece.offset))
        return parameter.name, parameter.shape, tuple(relative)

    contents = tuple(tuple(map(content, shard.parameters)) for shard in distinct)
    return contents, tuple(places[id(shard)] for shard in shards)
