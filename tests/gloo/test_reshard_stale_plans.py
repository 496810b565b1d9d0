"""A plan that no longer fits is refused before anything is touched, and the error says what has changed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.errors import HybridEngineError
from hybridengine.model_shapes import ModelShape
from hybridengine.runtime import fingerprint
from hybridengine.runtime.hybrid_engine import HybridEngine, Mode
from hybridengine.runtime.process_groups import ProcessGroups
from hybridengine.runtime.transport import PointToPointTransport
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from tests.gloo.megatron_training import copy_weights, make_trainer, same_weights, step
from tests.gloo.plain_generation import make_engine
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

TIMEOUT_S = 3.0
BUCKET_ELEMENTS = 40_000
NUM_RANKS, BROKEN_RANK = 3, 1
"""Trained as three stages; each rank becomes an engine."""
NORM, NORM_SIZE = "decoder.layers.0.input_layernorm.weight", 64
"""A parameter that every stage has."""


@contextlib.contextmanager
def other_data(trainer: MegatronTrainer, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """While open, the parameter's data is `change(its data)`."""
    parameter = trainer._module.get_parameter(NORM)
    data = parameter.data
    parameter.data = change(data)
    try:
        yield
    finally:
        parameter.data = data


@contextlib.contextmanager
def other_parameter(trainer: MegatronTrainer, is_gone: bool = False) -> Iterator[None]:
    """While open, the module has another parameter, with equal data; or none."""
    module = trainer._module.get_submodule(NORM.removesuffix(".weight"))
    parameter = trainer._module.get_parameter(NORM)
    module.register_parameter("weight", None if is_gone else torch.nn.Parameter(parameter.detach().clone()))
    try:
        yield
    finally:
        module.register_parameter("weight", parameter)


Tampering = Callable[[MegatronTrainer], contextlib.AbstractContextManager[None]]

TAMPERINGS: dict[str, Tampering] = {
    rf"{NORM} has another storage,": lambda trainer: other_data(trainer, torch.clone),
    rf"{NORM} has another storage, ": other_parameter,
    rf"{NORM} has another storage, shape \({NORM_SIZE},\) -> \(32,\),": lambda trainer: other_data(
        trainer, lambda data: data[:32].clone()
    ),
    rf"{NORM} has another storage, dtype torch.float32 -> torch.bfloat16,": lambda trainer: other_data(
        trainer, torch.Tensor.bfloat16
    ),
    rf"{NORM} has offset 0 -> 8, shape \({NORM_SIZE},\) -> \(56,\),": lambda trainer: other_data(
        trainer, lambda data: data[8:]
    ),
    rf"{NORM} has shape \({NORM_SIZE},\) -> \(32,\), strides \(1,\) -> \(2,\),": lambda trainer: other_data(
        trainer, lambda data: data[::2]
    ),
    rf"{NORM} is gone,": lambda trainer: other_parameter(trainer, is_gone=True),
}
"""What the error says about the parameter -> what was done to it."""


@dataclass(frozen=True)
class Refusal:
    """A switch that was refused on one rank."""

    error: str
    nothing_touched: bool
    """Mode, weights, gradients and generation storages are as before."""
    next_error: str
    """Of the same engine, once everything is as it was: other ranks may have begun what this one refused."""
    works_anew: bool
    """An engine that is made anew then switches there and back."""


def refuse_in_turn(rank: int, folder: Path) -> list[Refusal]:
    trainer, make = trainer_of(rank, folder)
    answers = []
    for tampering in TAMPERINGS.values():
        engine = make()
        before, gradient_bytes = copy_weights(trainer), trainer.gradient_bytes
        with tampering(trainer):
            error = error_of(engine.to_generate)
            untouched = engine.mode is Mode.TRAINING and trainer.gradient_bytes == gradient_bytes > 0
            untouched &= engine._generation.weights.live_bytes == 0
        untouched &= same_weights(before, copy_weights(trainer))
        next_error = error_of(engine.to_generate)
        engine = make()
        engine.to_generate()
        engine.to_train()
        works = same_weights(before, copy_weights(trainer))
        answers.append(Refusal(error, untouched, next_error, works))
    return answers


def trainer_of(rank: int, folder: Path) -> tuple[MegatronTrainer, Callable[..., HybridEngine]]:
    """A trainer of three stages, and what makes an engine for it."""
    shape = ModelShape.from_folder(folder)
    trainer = make_trainer(shape, Grid(TrainSizes(NUM_RANKS, 1, 1)), rank, ProcessGroups(), folder)
    step(trainer, 0)

    def make(
        bucket_elements: int = BUCKET_ELEMENTS,
        transport: Callable[[dist.ProcessGroup], PointToPointTransport] = PointToPointTransport,
    ) -> HybridEngine:
        return make_engine(trainer, "1-1", ProcessGroups(TIMEOUT_S), bucket_elements, transport)[0]

    return trainer, make


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except HybridEngineError as raised:
        return f"{type(raised).__name__}: {raised}"
    return "none"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, "llama")
    return tmp_path


def test_a_parameter_that_has_moved_is_named(folder: Path, run_ranks: RankLauncher):
    for rank, refusals in enumerate(run_ranks(NUM_RANKS, refuse_in_turn, folder)):
        for what, refusal in zip(TAMPERINGS, refusals, strict=True):
            assert re.match(
                rf"PlanError: the plan is stale: rank {rank}, megatron 3-1-1: {what.rstrip()} since the plan was bound",
                refusal.error,
            ), refusal.error
            assert refusal.nothing_touched, what
            assert re.match(
                rf"PlanError: the plan is stale: rank {rank}, a switch over its process group has failed, since .*;"
                " make the engine anew, with a process group of its own$",
                refusal.next_error,
            ), refusal.next_error
            assert refusal.works_anew, what


def refuse_alone(rank: int, folder: Path) -> list[str]:
    """One rank's parameter has moved; after that, engines on groups that are gone, there and back."""
    trainer, make = trainer_of(rank, folder)
    engine, before, errors = make(), copy_weights(trainer), []
    with other_parameter(trainer) if rank == BROKEN_RANK else contextlib.nullcontext():
        errors.append(error_of(engine.to_generate))
    assert engine.mode is Mode.TRAINING
    dist.barrier()
    engine = make()
    dist.destroy_process_group(engine._gather._transport.group)
    errors.append(error_of(engine.to_generate))
    assert engine.mode is Mode.TRAINING
    engine = make()
    engine.to_generate()
    dist.destroy_process_group(engine._gather._transport.group)
    errors.append(error_of(engine.to_train))
    assert same_weights(before, copy_weights(trainer))
    return errors


def test_others_learn_who_has_refused_and_groups_that_are_gone(folder: Path, run_ranks: RankLauncher):
    for rank, (alone, there, back) in enumerate(run_ranks(NUM_RANKS, refuse_alone, folder)):
        stale = rf"the plan is stale: rank {BROKEN_RANK}, megatron 3-1-1: {NORM} has another storage"
        if rank == BROKEN_RANK:
            assert re.match(f"PlanError: {stale}", alone)
        else:
            assert re.match(f"TransferError: rank {rank}: bucket", alone)
            assert re.search(rf"rank 1 failed by itself in the check before the switch: {stale}", alone), (
                alone
            )
            assert "missing" not in alone
        assert re.match(
            f"PlanError: the plan is stale: rank {rank}, its process group has been destroyed", there
        ), there
        assert back == "none", "the way back needs no group"


def disagree(rank: int, folder: Path) -> list[str]:
    """Errors of engines that cannot be made: other buckets on one rank, other software, another group."""
    trainer, make = trainer_of(rank, folder)
    before, errors = copy_weights(trainer), []
    own_size = BUCKET_ELEMENTS // (2 if rank == BROKEN_RANK else 1)
    errors.append(error_of(lambda: make(own_size)))
    versions = fingerprint.metadata.version
    with mock.patch.object(
        fingerprint.metadata, "version", lambda name: f"{rank // 2}" if name == "torch" else versions(name)
    ):
        errors.append(error_of(make))
    pairs = [cast(dist.ProcessGroup, dist.new_group(ranks)) for ranks in ([0, 1], [1, 2])]
    errors.append(error_of(lambda: make(transport=lambda _: PointToPointTransport(pairs[rank // 2]))))
    assert same_weights(before, copy_weights(trainer))
    make().to_generate()
    return errors


def test_ranks_that_disagree_make_no_engine(folder: Path, run_ranks: RankLauncher):
    for rank, (plans, software, group) in enumerate(run_ranks(NUM_RANKS, disagree, folder)):
        other = 0 if rank == BROKEN_RANK else BROKEN_RANK
        assert plans.startswith(
            f"PlanError: ranks {rank} and {other} have compiled different plans for the same domain"
        ), plans
        assert re.search("same model, sizes and bucket size$", plans)
        other = 0 if rank == 2 else 2
        assert software.startswith(
            f"PlanError: ranks {rank} and {other} run different software (torch 0, torch 1);"
        ), software
        members = [0, 1] if rank < 2 else [1, 2]
        assert group == (
            f"PlanError: rank {rank}: the plan is for ranks [0, 1, 2], its process group has ranks {members}; give the"
            " group of the plan's domain"
        )
