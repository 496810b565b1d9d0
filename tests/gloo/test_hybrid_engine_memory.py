"""A switch really frees memory: the resident set of a rank, read from the kernel after the allocator has freed it too."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.config.role_sections import OptimizerSection
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import return_memory_to_system
from tests.gloo.megatron_training import loss_of, same_weights
from tests.gloo.plain_generation import make_engine
from tests.gloo.ranks import RankLauncher
from tests.gloo.staged_transport import Stage, StagedTransport, stages_known

SHAPE = ModelShape(
    family="llama",
    num_layers=5,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    vocab_size=1024,
    max_positions=64,
)
"""Sizes of a model of 345 MB in float32."""

BUCKET_ELEMENTS = 10 * 2**20
SLACK_BYTES = 48 * 2**20
"""Tolerance for other allocations in a process; a forgotten training shard would be 172 MB."""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Resident:
    """Resident set of one rank over two round trips, and the sizes that it should follow."""

    train_bytes: int
    gen_bytes: int
    gradient_bytes: int
    training: list[int] = field(default_factory=list)
    """Resident bytes right after an optimizer step."""
    switching: list[int] = field(default_factory=list)
    """Largest value when a bucket's messages had arrived on the way to generation."""
    generating: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)
    """Resident bytes after the way back, without gradients, which wait for a pass."""
    weights_equal: bool = True


def first_rows(trainer: MegatronTrainer) -> dict[str, Tensor]:
    return {name: trainer.weights[name][:1].clone() for name in trainer.weights.names}


def watch_round_trips(rank: int) -> Resident:
    initialize_globals(1)
    registry = ProcessGroups()
    torch.manual_seed(rank)
    trainer = MegatronTrainer(SHAPE, Grid(TrainSizes(1, 2, 1)), rank, registry)
    for name in trainer.weights.names:
        trainer.weights[name].normal_(0.0, 0.02)
    trainer.start_optimizer(OptimizerSection(lr=1e-4))
    switching: list[int] = []

    def at_stage(stage: Stage) -> None:
        if stage.name == "arrived":
            switching.append(resident_bytes())

    engine, side = make_engine(
        trainer, "1-1", registry, BUCKET_ELEMENTS, lambda group: StagedTransport(group, at_stage)
    )
    batch = {"tokens": torch.arange(8)[None], "lengths": torch.tensor([8])}
    trainer.train_step([batch], loss_of(trainer))  # creates the optimizer's moments, which stay
    resident = Resident(trainer.weights.total_bytes, side.weights.total_bytes, trainer.gradient_bytes)
    for _ in range(2):
        trainer.train_step([batch], loss_of(trainer))
        return_memory_to_system()  # free memory that the allocator keeps for the next tensors
        resident.training.append(resident_bytes())
        before = first_rows(trainer)
        switching.clear()
        with stages_known(), engine.generating():
            return_memory_to_system()
            resident.generating.append(resident_bytes())
            resident.switching.append(max(switching))
        return_memory_to_system()
        resident.back.append(resident_bytes())
        resident.weights_equal &= same_weights(before, first_rows(trainer))
    return resident


def test_the_released_side_leaves_the_process(run_ranks: RankLauncher):
    bucket_bytes = 4 * BUCKET_ELEMENTS
    for resident in run_ranks(2, watch_round_trips):
        assert resident.gen_bytes > 300e6
        assert resident.train_bytes + resident.gradient_bytes > 300e6
        assert resident.weights_equal
        for training, switching, generating, back in zip(
            resident.training, resident.switching, resident.generating, resident.back, strict=True
        ):
            rest = training - resident.train_bytes - resident.gradient_bytes
            assert abs(generating - rest - resident.gen_bytes) < SLACK_BYTES
            assert switching < rest + resident.gen_bytes + bucket_bytes + SLACK_BYTES
            assert abs(back - rest - resident.train_bytes) < SLACK_BYTES
        assert abs(resident.training[1] - resident.training[0]) < SLACK_BYTES
