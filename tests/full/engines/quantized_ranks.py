"""Runs on each rank: a Megatron trainer in bfloat16 and a vLLM engine in FP8, over two round trips and a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.backends.engine import Response, SamplingSettings, generate
from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.backends.megatron.weights import load_weights, save_weights
from hybridengine.backends.vllm.construction import EngineSettings
from hybridengine.backends.vllm.engine import VllmEngine
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.domains import domains
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid, group_with
from hybridengine.topology.sizes import GenSizes, TrainSizes
from hybridengine.weights.hybrid_engine import HybridEngine, Return
from hybridengine.weights.ledger import SwitchReport
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.transport import PointToPointTransport
from tests.full.engines.hybrid_rounds import _train
from tests.full.engines.vllm_ranks import take_place

NEW_TOKENS = 8
PROMPTS = [[1], [7, 130, 64], list(range(40))]
BUCKET_ELEMENTS = 100_000


@dataclass(frozen=True)
class Trip:
    """A switch to generation and back."""

    replica: int
    to_generate: SwitchReport
    to_train: SwitchReport
    drawn: list[Response]
    products: dict[str, tuple[Tensor, Tensor]]
    """Tokens and their products with each matrix of the first layer."""
    is_unchanged: bool
    """True if the training weights are bitwise those before the switch."""
    train_bytes: int
    engine_bytes: int


def make_trips(rank: int, folder: Path, sizes: tuple[str, str], back: Return, trained: Path) -> list[Trip]:
    identity = take_place(rank)
    initialize_globals(1)
    registry, shape = ProcessGroups(), ModelShape.from_folder(folder)
    grid = Grid(TrainSizes.parse(sizes[0]))
    generation = GenerationGrid(grid, GenSizes.parse(sizes[1]))
    trainer = MegatronTrainer(shape, grid, rank, registry, "bfloat16")
    load_weights(trainer, folder)
    trainer.start_optimizer(OptimizerSection(lr=0.01), offload="optimizer")
    trainer.leave_training()
    settings = EngineSettings(128, kv_cache_bytes=16 * 2**20, dtype="bfloat16", seed=17, quantization="fp8")
    engine = VllmEngine(folder, shape, generation, settings, identity)
    groups = domains(trainer.layout, engine.layout)
    hybrid = HybridEngine(
        compile_plan(trainer.layout, engine.layout, group_with(rank, groups), BUCKET_ELEMENTS),
        rank,
        trainer,
        engine,
        PointToPointTransport(registry.new(groups)),
        back=back,
    )
    dist.barrier()
    trips = []
    for number in range(2):
        if number:
            _train(trainer, shape)
            save_weights(trainer, registry, trained, folder)
        before = {name: trainer.weights[name].clone() for name in trainer.weights.names}
        to_generate = hybrid.to_generate()
        greedy = [SamplingSettings(NEW_TOKENS, 0.0)] * len(PROMPTS)
        drawn = generate(engine, PROMPTS, range(len(PROMPTS)), greedy)
        products = _products(engine)
        to_train = hybrid.to_train()
        unchanged = all(torch.equal(before[name], trainer.weights[name]) for name in before)
        trips.append(
            Trip(
                generation.coordinate(rank).replica_rank,
                to_generate,
                to_train,
                drawn,
                products,
                unchanged,
                trainer.weights.total_bytes,
                engine.weights.total_bytes,
            )
        )
    return trips


def _products(engine: VllmEngine) -> dict[str, tuple[Tensor, Tensor]]:
    layers = engine._runner.model.model.layers
    found = {}
    for name, module in layers[0].named_modules():
        if name.endswith("_proj"):
            tokens = torch.randn(
                7, module.weight.size(1), generator=torch.Generator().manual_seed(5)
            ).bfloat16()
            with torch.no_grad():
                found[name] = tokens, module.quant_method.apply(module, tokens)
    return found
