"""A generation side without an engine: plain tensors in vLLM's layout. Real vLLM is covered in tests/full."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from hybridengine.backends.megatron.model import DTYPES
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.reshard.planner import compile_plan
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.runtime.hybrid_engine import HybridEngine
from hybridengine.runtime.process_groups import ProcessGroups
from hybridengine.runtime.storage import WeightStorage
from hybridengine.runtime.transport import PointToPointTransport
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.sizes import GenSizes


class PlainGeneration:
    """Implements GenerationSide, and notes what it finds whenever the HybridEngine calls it."""

    def __init__(self, generation: GenerationGrid, trainer: MegatronTrainer) -> None:
        self.layout = vllm_layout(trainer.shape, generation)
        self.weights = WeightStorage(
            {
                parameter.name: torch.full(parameter.shape, float("nan"), dtype=DTYPES[trainer.dtype])
                for parameter in self.layout.shard(trainer.rank).parameters
            }
        )
        self.calls: list[str] = []

    def leave_generation(self) -> None:
        self.calls.append("leave")

    def enter_generation(self) -> None:
        self.calls.append("enter")


def make_engine(
    trainer: MegatronTrainer,
    gen_sizes: str,
    registry: ProcessGroups,
    bucket_elements: int,
    transport: Callable[[dist.ProcessGroup], PointToPointTransport] = PointToPointTransport,
) -> tuple[HybridEngine, PlainGeneration]:
    """A HybridEngine between a real trainer and a plain generation side."""
    generation = GenerationGrid(trainer.grid, GenSizes.parse(gen_sizes))
    side = PlainGeneration(generation, trainer)
    domain = next(ranks for ranks in generation.micro_dp_groups if trainer.rank in ranks)
    plan = compile_plan(trainer.layout, side.layout, domain, bucket_elements)
    group = registry.of(generation.micro_dp_groups)
    return HybridEngine(plan, trainer.rank, trainer, side, transport(group)), side
