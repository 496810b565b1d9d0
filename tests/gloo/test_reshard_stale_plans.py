"""A plan that no longer fits is refused before anything is changed, and the error names the difference."""

from __future__ import annotations

import contextlib
import re
import time
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
from hybridengine.machine import package_versions
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights import hybrid_engine
from hybridengine.weights.executor import Verify
from hybridengine.weights.hybrid_engine import HybridEngine, Mode
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import WeightStorage
from hybridengine.weights.transport import PointToPointTransport
from tests.gloo.megatron_training import copy_weights, make_trainer, same_weights, step
from tests.gloo.plain_generation import make_engine
from tests.gloo.ranks import RankLauncher
from tests.gloo.staged_transport import Stage, StagedTransport, stages_known
from tests.gloo.tiny_models import write_model

TIMEOUT_S = 3.0
BUCKET_ELEMENTS = 40_000
NUM_RANKS, BROKEN_RANK = 3, 1
"""Ranks, which train as three stages and each become an engine, and the rank that is broken."""
NORM = "decoder.layers.0.input_layernorm.weight"
"""A parameter that every stage has."""


@contextlib.contextmanager
def other_data(trainer: MegatronTrainer, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """While open, the parameter's data is `change(its data)`."""
    parameter = trainer._chunks[0].get_parameter(NORM)
    data = parameter.data
    parameter.data = change(data)
    try:
        yield
    finally:
        parameter.data = data


@contextlib.contextmanager
def other_parameter(trainer: MegatronTrainer, is_gone: bool = False) -> Iterator[None]:
    """While open, the module has another parameter with equal data, or no parameter if `is_gone`."""
    module = trainer._chunks[0].get_submodule(NORM.removesuffix(".weight"))
    parameter = trainer._chunks[0].get_parameter(NORM)
    module.register_parameter("weight", None if is_gone else torch.nn.Parameter(parameter.detach().clone()))
    try:
        yield
    finally:
        module.register_parameter("weight", parameter)


Tampering = Callable[[MegatronTrainer], contextlib.AbstractContextManager[None]]

TAMPERINGS: dict[str, Tampering] = {
    "other storage": lambda trainer: other_data(trainer, torch.clone),
    "other parameter": other_parameter,
    "other size": lambda trainer: other_data(trainer, lambda data: data[:32].clone()),
    "other type": lambda trainer: other_data(trainer, torch.Tensor.bfloat16),
    "other offset": lambda trainer: other_data(trainer, lambda data: data[8:]),
    "other strides": lambda trainer: other_data(trainer, lambda data: data[::2]),
    "no parameter": lambda trainer: other_parameter(trainer, is_gone=True),
}
"""Changes of a parameter."""
STALE = f"{NORM} moved or changed shape, type or device,"


@dataclass(frozen=True)
class Refusal:
    """A switch that was refused on one rank."""

    error: str
    nothing_touched: bool
    """True if mode, weights, gradients and generation storages are as before."""
    next_error: str
    """Error of the same engine after the state is restored: other ranks may have begun the refused switch."""
    works_anew: bool
    """True if a newly created engine then switches there and back."""


def refuse_in_turn(rank: int, folder: Path) -> list[Refusal]:
    trainer, make = trainer_of(rank, folder)
    answers = []
    for tampering in TAMPERINGS.values():
        engine = make()
        before = copy_weights(trainer)
        with tampering(trainer):
            error = error_of(engine.to_generate)
            untouched = engine.mode is Mode.TRAINING
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
    """Return a trainer of three stages, and a function that creates an engine for it."""
    shape = ModelShape.from_folder(folder)
    trainer = make_trainer(shape, Grid(TrainSizes(NUM_RANKS, 1, 1)), rank, ProcessGroups(), folder)
    step(trainer, 0)

    def make(
        bucket_elements: int = BUCKET_ELEMENTS,
        transport: Callable[[dist.ProcessGroup], PointToPointTransport] = PointToPointTransport,
        verify: Verify = Verify.FIRST,
    ) -> HybridEngine:
        return make_engine(
            trainer, "1-1", ProcessGroups(TIMEOUT_S), bucket_elements, transport, verify=verify
        )[0]

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
                rf"PlanError: the plan is stale: rank {rank}, megatron 3-1-1: {STALE} since the plan was bound",
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
    """Move one rank's parameter; after that, use engines on groups that no longer exist, there and back."""
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
        stale = rf"the plan is stale: rank {BROKEN_RANK}, megatron 3-1-1: {STALE}"
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
    """Return the errors of engines that cannot be created: other buckets on one rank, other software, another group."""
    trainer, make = trainer_of(rank, folder)
    before, errors = copy_weights(trainer), []
    own_size = BUCKET_ELEMENTS // (2 if rank == BROKEN_RANK else 1)
    errors.append(error_of(lambda: make(own_size)))
    versions = {**package_versions(), "torch": f"{rank // 2}"}
    with mock.patch.object(hybrid_engine, "package_versions", return_value=versions):
        errors.append(error_of(make))
    pairs = [cast(dist.ProcessGroup, dist.new_group(ranks)) for ranks in ([0, 1], [1, 2])]
    errors.append(error_of(lambda: make(transport=lambda _: PointToPointTransport(pairs[rank // 2]))))
    errors.append(error_of(lambda: make(verify=Verify.ALWAYS if rank == BROKEN_RANK else Verify.NEVER)))
    weights = {name: trainer.weights[name].clone() for name in trainer.weights.names if name != NORM}
    lacking = mock.patch.object(trainer, "weights", WeightStorage(weights))
    with lacking if rank == BROKEN_RANK else contextlib.nullcontext():
        errors.append(error_of(make))
    assert same_weights(before, copy_weights(trainer))
    make().to_generate()
    return errors


def switch_without_weights(rank: int, folder: Path) -> list[str]:
    """Let a parameter of one rank own no memory, before the first switch and again after the plan was carried out."""
    trainer, make = trainer_of(rank, folder)
    before, errors = copy_weights(trainer), []
    for is_first in (True, False):
        engine = make()
        if not is_first:
            engine.to_generate()
            engine.to_train()
        if rank == BROKEN_RANK:
            trainer.weights.release([NORM])
        errors.append(error_of(engine.to_generate))
        if rank == BROKEN_RANK:
            trainer.weights.materialise([NORM])
            trainer.weights[NORM].copy_(before[NORM])
        assert engine.mode is Mode.TRAINING
        assert same_weights(before, copy_weights(trainer))
        dist.barrier()
    return errors


def test_weights_that_own_no_memory_are_not_read(folder: Path, run_ranks: RankLauncher):
    said = rf"stale: rank {BROKEN_RANK}, megatron 3-1-1: {NORM} have given up their memory, since the plan was bound"
    for rank, errors in enumerate(run_ranks(NUM_RANKS, switch_without_weights, folder)):
        for error in errors:
            assert re.search(said, error), error
            assert error.startswith(
                "PlanError" if rank == BROKEN_RANK else f"TransferError: rank {rank}: bucket"
            )


def test_ranks_that_disagree_make_no_engine(folder: Path, run_ranks: RankLauncher):
    for rank, (plans, software, group, verify, model) in enumerate(run_ranks(NUM_RANKS, disagree, folder)):
        other = 0 if rank == BROKEN_RANK else BROKEN_RANK
        assert re.match(rf"PlanError: ranks {rank} and {other} differ in plan: \w+ and \w+;", plans), plans
        assert re.search("give all ranks the same packages, model, sizes, bucket size and verify$", plans)
        other = 0 if rank == 2 else 2
        versions = "1 and 0" if rank == 2 else "0 and 1"
        assert software.startswith(f"PlanError: ranks {rank} and {other} differ in torch: {versions};"), (
            software
        )
        members = [0, 1] if rank < 2 else [1, 2]
        assert group == (
            f"PlanError: rank {rank}: the plan is for ranks [0, 1, 2], its process group has ranks {members}; give the"
            " group of the plan's domain"
        )
        other = 0 if rank == BROKEN_RANK else BROKEN_RANK
        times = ("always", "never") if rank == BROKEN_RANK else ("never", "always")
        assert verify.startswith(
            f"PlanError: ranks {rank} and {other} differ in verify: {times[0]} and {times[1]}; give all ranks the same"
        )
        problem = (
            rf"rank {BROKEN_RANK} of megatron 3-1-1: {NORM} differ: the model has {NORM} with shape missing"
        )
        others = "" if rank == BROKEN_RANK else rf"rank {BROKEN_RANK} cannot carry out the plan: "
        assert re.match(f"PlanError: {others}{problem}", model), model


def stop_alone(rank: int, folder: Path) -> list[tuple[str, float]]:
    """Stop one rank in the middle of a switch, or before it begins; return each rank's error and its delay."""
    trainer, make = trainer_of(rank, folder)
    before, told = copy_weights(trainer), []
    for stop in (KeyboardInterrupt("of this test"), KeyError("of this test"), None):

        def at_stage(stage: Stage, stop: BaseException | None = stop) -> None:
            if stop is not None and rank == BROKEN_RANK and stage.name == "post":
                raise stop

        with stages_known():
            engine = make(transport=lambda group, at_stage=at_stage: StagedTransport(group, at_stage))
            if stop is None and rank == BROKEN_RANK:
                engine.mode = Mode.GENERATING
            started = time.monotonic()
            try:
                engine.to_generate()
            except (HybridEngineError, KeyboardInterrupt, KeyError) as error:
                told.append((str(error), time.monotonic() - started))
        dist.barrier()
        if stop is not None:
            assert engine.mode is Mode.TRAINING
        assert same_weights(before, copy_weights(trainer))
    return told


def test_others_learn_of_a_rank_that_stops_by_itself(folder: Path, run_ranks: RankLauncher):
    reasons = (
        r"bucket 0 of .*: KeyboardInterrupt: of this test",
        r"bucket 0 of .*: KeyError: 'of this test'",
    )
    by_rank = run_ranks(NUM_RANKS, stop_alone, folder)
    for rank in {0, 1, 2} - {BROKEN_RANK}:
        *stopped, (absent, absent_s) = by_rank[rank]
        for (error, seconds), reason in zip(stopped, reasons, strict=True):
            assert re.search(f"rank {BROKEN_RANK} failed by itself in {reason}", error), error
            assert "missing" not in error
            assert seconds < 10 * TIMEOUT_S
        assert f"missing ranks: [{BROKEN_RANK}]" in absent
        assert absent_s < 10 * TIMEOUT_S
    for (error, _), said in zip(
        by_rank[BROKEN_RANK], ("of this test", "'of this test'", "switch once"), strict=True
    ):
        assert said in error
