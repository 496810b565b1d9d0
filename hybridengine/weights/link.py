"""Link between the ranks that train the actor and engines on ranks of their own, over which weights are pushed.

Each side keeps its own torch.distributed world: Megatron's optimizer talks to all of the trainers' ranks, and an engine
that ends takes nobody with it. A link joins both in additional process groups, one for each domain of the plan. Its ranks
are numbered in one sequence: trainers first, in their order, then the engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from hybridengine.families.family import NameSet
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.domains import domains
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.plan import Plan
from hybridengine.reshard.vllm import engines_layout
from hybridengine.topology.grid import Grid, group_with
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import GenSizes
from hybridengine.weights.executor import Verify
from hybridengine.weights.hybrid_engine import WeightPush
from hybridengine.weights.process_groups import join_group
from hybridengine.weights.storage import WeightStorage
from hybridengine.weights.transport import PointToPointTransport


@dataclass(frozen=True)
class Link:
    """Facts that all ranks of a link share."""

    name: str
    """Name of the link, unique in a run: a link to other engines is another one."""
    address: str
    """Address of the store of the first trainer."""
    port: int
    train: Grid
    names: NameSet
    """Megatron's parameter names on the trainers."""
    engine: GenSizes
    """Sizes of each engine."""
    num_engines: int
    nodes: NodeMap
    """Nodes of all ranks."""
    bucket_elements: int
    verify: Verify
    adapted: bool = True
    """True if engines have the model's adapters as parameters; False if they load them from files."""

    @property
    def num_ranks(self) -> int:
        return self.train.num_ranks + self.num_engines * self.engine.num_ranks

    def first_rank(self, engine: int) -> int:
        """Return the first rank of the engine with this number."""
        return self.train.num_ranks + engine * self.engine.num_ranks

    def layouts(self, shape: ModelShape) -> tuple[Layout, Layout]:
        """Return the layouts of the trainers and of the engines; PlanError if one cannot hold the model."""
        source = megatron_layout(shape, self.train, self.names)
        first = self.first_rank(0)
        return source, engines_layout(shape, self.engine, self.num_engines, first, self.adapted)

    def plan(self, shape: ModelShape, rank: int) -> Plan:
        """Return the plan of the ranks with which `rank` exchanges weights."""
        source, destination = self.layouts(shape)
        domain = group_with(rank, domains(source, destination))
        return compile_plan(source, destination, domain, self.bucket_elements, self.nodes)

    def join(
        self,
        shape: ModelShape,
        rank: int,
        timeout_s: float,
        source: WeightStorage,
        destination: WeightStorage,
    ) -> WeightPush:
        """Join the process group of the plan of `rank`, and return its part in the pushes. Collective over the link.

        Args:
            source, destination: weights of this rank's policy and engine; it has one of them, the other is empty.

        Raises: PlanError as `WeightPush` does.
        """
        plan = self.plan(shape, rank)
        store = dist.TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=timeout_s))
        name = f"{self.name}/{min(plan.ranks)}"
        group = join_group(store, name, sorted(plan.ranks), rank, timeout_s)
        return WeightPush(plan, rank, source, destination, PointToPointTransport(group), self.verify)
