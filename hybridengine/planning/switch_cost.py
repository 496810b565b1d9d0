"""What a switch costs on a whole cluster: plans of the domains that differ, and what follows from them for every rank.

Training replicas repeat each other, and tensor shards are alike, so that most domains differ in the names of their ranks
and in where their boxes start, and in nothing that costs. One of them is compiled, and counted as often as it repeats.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from hybridengine.errors import PlanError
from hybridengine.model_shapes import DTYPE_BYTES, ModelShape
from hybridengine.planning.clusters import Cluster
from hybridengine.planning.switch_time import DomainTraffic, line_rate_seconds, node_shares, predict_seconds
from hybridengine.reshard.audit import audit, audit_return
from hybridengine.reshard.boxes import moved, starts
from hybridengine.reshard.cost import REMOTE, RankCost, plan_costs
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
"""Of a domain, rank by rank: what decides its plan."""


@dataclass(frozen=True)
class DomainPlan:
    """A plan of one domain, its way back, and what follows from both, rank by rank in the plan's order."""

    plan: Plan
    nodes: NodeMap
    element_bytes: int

    @cached_property
    def back(self) -> Plan:
        return inverse_local(self.plan)

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """What the audit finds wrong with either way; nothing, unless the planner has an error."""
        return (*audit(self.plan), *audit_return(self.plan, self.back))

    @cached_property
    def num_moves(self) -> int:
        """Of both ways."""
        return sum(len(bucket.moves) for plan in (self.plan, self.back) for bucket in plan.buckets)

    @cached_property
    def costs_there(self) -> tuple[RankCost, ...]:
        return self._costs(self.plan)

    @cached_property
    def costs_back(self) -> tuple[RankCost, ...]:
        return self._costs(self.back)

    def _costs(self, plan: Plan) -> tuple[RankCost, ...]:
        costs = plan_costs(plan, self.element_bytes, self.nodes)
        return tuple(costs[rank] for rank in plan.ranks)

    @cached_property
    def traffic_there(self) -> DomainTraffic:
        return DomainTraffic.of(self.plan, self.nodes)

    @cached_property
    def traffic_back(self) -> DomainTraffic:
        return DomainTraffic.of(self.back, self.nodes)

    @cached_property
    def received_bytes(self) -> Mapping[LinkClass, tuple[int, ...]]:
        """Link class -> bytes that each rank receives on the way there."""
        received = self.traffic_there.received_KSR
        return {
            link: tuple((received[link].sum(axis=(0, 1)) * self.element_bytes).tolist()) for link in REMOTE
        }


@dataclass(frozen=True)
class SwitchCost:
    """What switching costs; a property without "total" in its name is of the rank with the most."""

    domains: tuple[tuple[DomainPlan, Groups], ...]
    """The domains that differ, each with the ranks of all domains that repeat it, in the plan's order of ranks."""
    nodes: NodeMap
    element_bytes: int

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(domain.plan for domain, _ in self.domains)

    def check(self) -> int:
        """Audit the plans; returns how many moves they have.

        Raises:
            PlanError: a plan is wrong.
        """
        for domain, _ in self.domains:
            if domain.problems:
                raise PlanError(
                    f"the plan {domain.plan} is wrong ({len(domain.problems)} problems, first: {domain.problems[0]});"
                    " this is an error of hybridengine: report it with this command"
                )
        return sum(domain.num_moves for domain, _ in self.domains)

    @property
    def num_domains(self) -> int:
        """Domains of all ranks, repetitions included."""
        return sum(len(repeats) for _, repeats in self.domains)

    @property
    def groups(self) -> Groups:
        """Domains of all ranks, in the order of their first ranks."""
        return tuple(sorted(ranks for _, repeats in self.domains for ranks in repeats))

    @property
    def num_crossing_domains(self) -> int:
        """Domains with ranks on more than one node."""
        return sum(len({self.nodes.node_of(rank) for rank in group}) > 1 for group in self.groups)

    @property
    def num_steps(self) -> int:
        """2 where some box enters a node once and is passed on inside it."""
        return max(plan.num_steps for plan in self.plans)

    @property
    def received_bytes(self) -> int:
        """Bytes received on the way there."""
        return max(
            sum(by_rank)
            for domain, _ in self.domains
            for by_rank in zip(*domain.received_bytes.values(), strict=True)
        )

    def received_over(self, link: LinkClass) -> int:
        """Bytes received over one class of links."""
        return max(max(domain.received_bytes[link]) for domain, _ in self.domains)

    def total_over(self, link: LinkClass) -> int:
        """Bytes that all ranks together receive over one class of links."""
        return sum(len(repeats) * sum(domain.received_bytes[link]) for domain, repeats in self.domains)

    @property
    def copied_bytes(self) -> int:
        """Bytes copied inside a rank on the way there."""
        return self._most(lambda cost: cost.copied_bytes)

    @property
    def copied_back_bytes(self) -> int:
        """Bytes copied inside a rank on the way back."""
        return max(cost.copied_bytes for domain, _ in self.domains for cost in domain.costs_back)

    @cached_property
    def busiest_memory(self) -> tuple[RankCost, RankCost]:
        """Costs there and back of the rank that holds the most bytes at any moment of either way."""
        return max(
            (
                pair
                for domain, _ in self.domains
                for pair in zip(domain.costs_there, domain.costs_back, strict=True)
            ),
            key=lambda pair: max(cost.peak_bytes for cost in pair),
        )

    @property
    def peak_bytes(self) -> int:
        """Weight and staging bytes at any moment of the way there or back."""
        return max(cost.peak_bytes for cost in self.busiest_memory)

    @property
    def num_meetings(self) -> int:
        """Buckets times the ranks that each rank of the domain meets, of the plan with the most."""
        return max(len(plan.buckets) * (len(plan.ranks) - 1) for plan in self.plans)

    @property
    def redundant_bytes(self) -> int:
        """Training weights that stay in memory while generating."""
        return self._most(lambda cost: cost.redundant_bytes)

    @property
    def extra_bytes(self) -> int:
        """Received beyond what nested layouts would take."""
        return self._most(lambda cost: cost.extra_bytes)

    @property
    def train_bytes(self) -> int:
        """Training shard."""
        return self._most(lambda cost: cost.source_bytes)

    @property
    def gen_bytes(self) -> int:
        """Generation shard."""
        return self._most(lambda cost: cost.destination_bytes)

    @property
    def bucket_bytes(self) -> int:
        """Destination and staging of the buckets in flight."""
        return self._most(lambda cost: cost.bucket_bytes)

    def _most(self, figure: Callable[[RankCost], int]) -> int:
        return max(figure(cost) for domain, _ in self.domains for cost in domain.costs_there)

    def seconds_there(self, cluster: Cluster) -> float:
        """Predicted seconds to generation on `cluster`."""
        return self._seconds(predict_seconds, [domain.traffic_there for domain, _ in self.domains], cluster)

    def line_rate_seconds(self, cluster: Cluster) -> float:
        """Seconds to generation if the busiest link were busy all the time."""
        return self._seconds(line_rate_seconds, [domain.traffic_there for domain, _ in self.domains], cluster)

    def seconds_back(self, cluster: Cluster) -> float:
        """Predicted seconds back to training on `cluster`."""
        return self._seconds(predict_seconds, [domain.traffic_back for domain, _ in self.domains], cluster)

    def _seconds(self, model: Callable[..., float], traffic: list[DomainTraffic], cluster: Cluster) -> float:
        shares = node_shares([repeats for _, repeats in self.domains], self.nodes)
        return model(traffic, shares, cluster, self.element_bytes)


MOST_PLANS = 2
"""That a pricer keeps: those of large models on many ranks take a hundred MB."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """The values that were asked for last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def find(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key; made where it is not there (any more)."""
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value
        while len(self._values) > self._most:
            self._values.popitem(last=False)
        return value


class SwitchPricer:
    """Prices switches of one model; domains that two layouts have in common are planned once.

    Args:
        bucket_bytes: weights in flight at once.
    """

    def __init__(self, shape: ModelShape, dtype: str, bucket_bytes: int) -> None:
        self.shape, self.dtype, self.bucket_bytes = shape, dtype, bucket_bytes
        self._plans = Recent[Hashable, DomainPlan](MOST_PLANS)
        self._costs = Recent[Hashable, SwitchCost](MOST_PLANS)

    def price(self, generation: GenerationGrid, nodes: NodeMap, two_step: bool = True) -> SwitchCost:
        """Cost of switching to `generation` and back.

        Args:
            two_step: let a box enter a node once, and pass it on inside the node.

        Raises:
            PlanError: the engines cannot hold the model, or a domain lacks some of it.
        """
        asked = (generation, nodes, two_step)
        return self._costs.find(asked, lambda: self._price(generation, nodes, two_step))

    def _price(self, generation: GenerationGrid, nodes: NodeMap, two_step: bool) -> SwitchCost:
        source, destination = (
            megatron_layout(self.shape, generation.train),
            vllm_layout(self.shape, generation),
        )
        element_bytes = DTYPE_BYTES[self.dtype]
        found = []
        for pattern, repeats in distinct_domains(source, destination, nodes):

            def planned(ranks: tuple[int, ...] = repeats[0]) -> DomainPlan:
                bucket_elements = self.bucket_bytes // element_bytes
                plan = compile_plan(
                    source, destination, ranks, bucket_elements, nodes=nodes, two_step=two_step
                )
                return DomainPlan(plan, nodes, element_bytes)

            found.append((self._plans.find((pattern, two_step), planned), repeats))
        return SwitchCost(tuple(found), nodes, element_bytes)


def gen_shard_bytes(shape: ModelShape, generation: GenerationGrid, dtype: str) -> int:
    """Bytes of the largest generation shard.

    Raises:
        PlanError: the engines cannot hold the model.
    """
    shards = vllm_layout(shape, generation).shards.values()
    return max(shard.num_elements for shard in shards) * DTYPE_BYTES[dtype]


def distinct_domains(source: Layout, destination: Layout, nodes: NodeMap) -> list[tuple[Pattern, Groups]]:
    """Domains whose plans differ in names of ranks and in where boxes start only, together under their pattern."""
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
    return [(pattern, tuple(repeats)) for pattern, repeats in found.items()]


def _contents(source: Layout, destination: Layout, ranks: tuple[int, ...]) -> Pattern:
    """Every parameter of every shard with its pieces, each logical tensor's boxes counted from the first among them, and
    which shards every rank has.

    Equal contents have equal plans: which boxes overlap, how large they are and where they lie in their parameters is
    all that the planner looks at.
    """
    shards = [layout.shard(rank) for layout in (source, destination) for rank in ranks]
    places: dict[int, int] = {}  # a shard -> its place among the distinct ones
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
