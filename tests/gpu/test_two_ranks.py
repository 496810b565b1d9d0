"""Two ranks on one GPU: a switch moves the bits that it moves on a CPU, and survives the death of a rank."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridengine.backends.megatron.groups import initialize_globals
from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.backends.megatron.weights import load_weights
from hybridengine.errors import TransferError
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.hybrid_engine import HybridEngine, Mode
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo import sharding_by_hand as by_hand
from tests.gloo.plain_generation import PlainGeneration, make_engine
from tests.gloo.staged_transport import Stage, stages_known
from tests.gloo.tiny_models import write_model
from tests.gpu import one_device
from tests.gpu.host_transport import HostTransport, StagedHostTransport

pytestmark = pytest.mark.gpu

BACKEND = "cpu:gloo,cuda:gloo"
TIMEOUT_S = 5.0
BUCKET_ELEMENTS = 40_000
BROKEN_RANK, BROKEN_BUCKET = 1, 2


@dataclass(frozen=True)
class Switched:
    on_gpu: bool
    generating: dict[str, Tensor]
    """Weights of the generation side after the switch, in host memory."""
    received_bytes: int
    redundant_bytes: int
    returned_whole: bool
    """True if the way back has restored the training weights bitwise."""
    training_bytes: int
    """Bytes of training weights and gradients while generating."""


def _trainer(rank: int, folder: Path, sizes: str) -> MegatronTrainer:
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    initialize_globals(1)
    shape = ModelShape.from_folder(folder)
    trainer = MegatronTrainer(shape, Grid(TrainSizes.parse(sizes)), rank, ProcessGroups())
    load_weights(trainer, folder)
    trainer.start_optimizer(one_device.OPTIMIZER)
    return trainer


def _weights(side: PlainGeneration | MegatronTrainer) -> dict[str, Tensor]:
    return {name: side.weights[name].cpu().clone() for name in side.weights.names}


def switch(rank: int, folder: Path, sizes: str) -> Switched:
    """Switch to t_g = 1 and back, with weights of the checkpoint."""
    trainer = _trainer(rank, folder, sizes)
    hybrid, side = make_engine(trainer, "1-1", ProcessGroups(60.0), BUCKET_ELEMENTS, HostTransport)
    before = _weights(trainer)
    report = hybrid.to_generate()
    generating, training_bytes = _weights(side), trainer.weights.live_bytes + trainer.gradient_bytes
    hybrid.to_train()
    return Switched(
        all(trainer.weights[name].is_cuda for name in before),
        generating,
        report.received_bytes,
        report.redundant_bytes,
        one_device.same(before, _weights(trainer)),
        training_bytes,
    )


def check_switched(folder: Path, sizes: TrainSizes, ranks: list[Switched]) -> None:
    """Assert that each rank has the slices of the checkpoint that its engine needs, in each bit."""
    shape = ModelShape.from_folder(folder)
    tensors = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    expected = by_hand.generation_weights(shape, tensors, by_hand.gen_part(shape, 0, 0, 1, 1, 1))
    received = [found.received_bytes > 0 for found in ranks]
    assert received == [sizes.tp_size > 1] * 2, "replicas have all that their engines need"
    for found in ranks:
        assert one_device.same(found.generating, expected)
        assert found.redundant_bytes == 0
        assert found.returned_whole
        assert found.training_bytes == 0


def write_small(folder: Path) -> Path:
    write_model(folder, "qwen3", tied=True)
    return folder


@pytest.mark.parametrize("sizes", ["1-2-1", "1-1-2"])
def test_a_switch_moves_the_bits_that_it_moves_on_a_cpu(on_device, folder, sizes):
    """Passes if two ranks, at t=2 and at d=2, gather exactly the checkpoint's slices into engines at t_g=1 on CUDA
    tensors whose storages come and go, and restore their training weights bitwise."""
    write_small(folder)
    ranks = on_device(2, switch, folder, sizes, backend=BACKEND)
    assert all(found.on_gpu for found in ranks)
    check_switched(folder, TrainSizes.parse(sizes), ranks)


@dataclass(frozen=True)
class Survivor:
    error: str
    mode: Mode
    is_whole: bool
    """True if the training weights are bitwise what they were."""
    other_bytes: int
    """Bytes of the generation side's weights."""


def switch_until_one_dies(rank: int, folder: Path) -> Survivor:
    """Switch at t=2; one rank ends its process before it sends the messages of a bucket."""
    trainer = _trainer(rank, folder, "1-2-1")
    engines: list[HybridEngine] = []

    def at_stage(stage: Stage) -> None:
        bucket = engines[0].plan.buckets[BROKEN_BUCKET]
        if rank == BROKEN_RANK and (stage.name, stage.bucket.tensors) == ("post", bucket.tensors):
            os._exit(1)

    with stages_known():
        hybrid, side = make_engine(
            trainer,
            "1-1",
            ProcessGroups(TIMEOUT_S),
            BUCKET_ELEMENTS,
            lambda group: StagedHostTransport(group, at_stage),
        )
        engines.append(hybrid)
        before, error = _weights(trainer), ""
        dist.barrier()
        try:
            hybrid.to_generate()
        except TransferError as raised:
            error = str(raised)
    return Survivor(
        error,
        hybrid.mode,
        one_device.same(before, _weights(trainer)),
        side.weights.live_bytes,
    )


def check_survivor(ranks: list[Survivor | None]) -> None:
    survivor = ranks[1 - BROKEN_RANK]
    assert ranks[BROKEN_RANK] is None
    assert survivor is not None
    assert re.search(rf"missing ranks: \[{BROKEN_RANK}\]", survivor.error), survivor.error
    assert survivor.mode is Mode.TRAINING
    assert survivor.is_whole
    assert survivor.other_bytes == 0


def test_the_other_rank_keeps_its_weights_when_one_dies(on_device, folder):
    """Passes if a rank whose peer is killed in the middle of a switch ends with an error that names the peer, and
    has its training weights, bitwise, and nothing of the engine's."""
    write_small(folder)
    check_survivor(on_device(2, switch_until_one_dies, folder, backend=BACKEND, may_die=[BROKEN_RANK]))
