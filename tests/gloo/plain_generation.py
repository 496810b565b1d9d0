"""A generation side without an engine: plain tensors in vLLM's layout. Real vLLM is covered in tests/full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.backends.megatron.model import DTYPES
from hybridengine.backends.megatron.shim import device
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.domains import domains
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import group_with
from hybridengine.topology.sizes import GenSizes
from hybridengine.weights.executor import Verify
from hybridengine.weights.hybrid_engine import HybridEngine
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import WeightStorage
from hybridengine.weights.transport import PointToPointTransport


class PlainGeneration:
    """Implements GenerationSide, and records the state that it finds at every call of the HybridEngine."""

    def __init__(self, layout: Layout, rank: int, dtype: str) -> None:
        self.layout = layout
        self.weights = WeightStorage(
            {
                parameter.name: torch.full(
                    parameter.shape, float("nan"), dtype=DTYPES[dtype], device=device()
                )
                for parameter in layout.shard(rank).parameters
            }
        )
        self.calls: list[str] = []

    def leave_generation(self) -> None:
        self.calls.append("leave")

    def enter_generation(self, version: int) -> None:
        self.calls.append("enter")


def make_engine(
    trainer: MegatronTrainer,
    gen_sizes: str,
    registry: ProcessGroups,
    bucket_elements: int,
    transport: Callable[[dist.ProcessGroup], PointToPointTransport] = PointToPointTransport,
    grouping: Grouping = Grouping.INTERVAL,
    verify: Verify = Verify.FIRST,
    resume_from: str = "",
    **plan_options: Any,
) -> tuple[HybridEngine, PlainGeneration]:
    """Return a HybridEngine between a real trainer and a plain generation side. Collective over the world.

    Args:
        plan_options: further arguments of `compile_plan`.
    """
    layout = vllm_layout(trainer.shape, GenerationGrid(trainer.grid, GenSizes.parse(gen_sizes), grouping))
    side = PlainGeneration(layout, trainer.rank, trainer.dtype)
    groups = domains(trainer.layout, layout)
    domain = group_with(trainer.rank, groups)
    plan = compile_plan(trainer.layout, layout, domain, bucket_elements, **plan_options)
    transport_of_domain = transport(registry.new(groups))
    engine = HybridEngine(plan, trainer.rank, trainer, side, transport_of_domain, verify, resume_from)
    return engine, side
