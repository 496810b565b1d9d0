"""Allocation failures during a switch: weights return to their place, can be restored later, or are reported as lost."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.errors import HybridEngineError
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.executor import Verify
from hybridengine.weights.hybrid_engine import HybridEngine, Mode
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.storage import WeightStorage
from tests.gloo.megatron_training import copy_weights, make_trainer, same_weights, step
from tests.gloo.plain_generation import PlainGeneration, make_engine
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

TIMEOUT_S = 3.0
BUCKET_ELEMENTS = 40_000
BROKEN_RANK, BROKEN_BUCKET = 2, 4
CHECKPOINT = "runs/one/step-7"
NO_MEMORY = "no memory left for this test"


@contextlib.contextmanager
def refusing(refuses: Callable[[torch.UntypedStorage, int], bool]) -> Iterator[None]:
    """While open, storages for which `refuses(storage, bytes)` is true cannot allocate memory."""
    resize = torch.UntypedStorage.resize_

    def resize_or_refuse(storage: torch.UntypedStorage, size: int) -> object:
        if size and refuses(storage, size):
            raise RuntimeError(NO_MEMORY)
        return resize(storage, size)

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_or_refuse):
        yield


def no_memory_for(weights: WeightStorage, *names: str) -> contextlib.AbstractContextManager[None]:
    """While open, these parameters cannot allocate memory."""
    victims = {weights[name].untyped_storage()._cdata for name in names}
    return refusing(lambda storage, size: storage._cdata in victims)


def no_more_memory_from(name: str, *sides: WeightStorage) -> contextlib.AbstractContextManager[None]:
    """While open, a parameter of the last side cannot allocate memory; from then on no side can grow."""
    own = {side[one].untyped_storage()._cdata for side in sides for one in side.names}
    victim = sides[-1][name].untyped_storage()._cdata
    limits: list[int] = []

    def refuses(storage: torch.UntypedStorage, size: int) -> bool:
        live_bytes = sum(side.live_bytes for side in sides)
        if storage._cdata == victim:
            limits.append(live_bytes)
        return storage._cdata == victim or (
            storage._cdata in own and bool(limits) and live_bytes + size > limits[0]
        )

    return refusing(refuses)


@dataclass(frozen=True)
class Made:
    """A trainer and an engine that switches it to one engine per rank."""

    trainer: MegatronTrainer
    registry: ProcessGroups
    engine: HybridEngine
    side: PlainGeneration

    def last_filled(self, bucket: int) -> str:
        """Return the parameter of a bucket that allocates memory last: those before it have some already."""
        return self.engine.plan.buckets[bucket].destinations[self.trainer.rank][-1]

    def last_restored(self, bucket: int) -> str:
        """Return the parameter of a bucket of the way back (-1: its last) that allocates memory last."""
        return self.engine.plan.buckets[-1 - bucket].sources[self.trainer.rank][-1]


def make(rank: int, folder: Path) -> Made:
    shape = ModelShape.from_folder(folder)
    trainer = make_trainer(shape, Grid(TrainSizes(1, 4, 1)), rank, ProcessGroups(), folder)
    step(trainer, 0)  # creates gradients and optimizer state
    registry = ProcessGroups(TIMEOUT_S)
    return Made(trainer, registry, *engine_of(trainer, registry))


def engine_of(trainer: MegatronTrainer, registry: ProcessGroups) -> tuple[HybridEngine, PlainGeneration]:
    """Return an engine that verifies its first switch."""
    return make_engine(
        trainer,
        "1-1",
        registry,
        BUCKET_ELEMENTS,
        verify=Verify.FIRST,
        resume_from=CHECKPOINT,
        direct_elements=1000,
    )


@dataclass(frozen=True)
class Aftermath:
    """State of a rank after a failed switch."""

    error: str
    mode: Mode
    weights_equal: bool
    gen_bytes: int
    round_trips_again: bool
    """True if a new engine, from the same registry of groups, switches there and back, and the trainer trains on."""


def fail_on_the_way_there(rank: int, folder: Path, bucket: int, is_full: bool) -> Aftermath:
    """One rank has no memory for a parameter; if `is_full`, it has none for anything else from then on."""
    made = make(rank, folder)
    trainer, engine, side = made.trainer, made.engine, made.side
    before = copy_weights(trainer)
    fault = contextlib.nullcontext()
    if rank == BROKEN_RANK and is_full:
        fault = no_more_memory_from(made.last_filled(bucket), trainer.weights, side.weights)
    elif rank == BROKEN_RANK:
        fault = no_memory_for(side.weights, made.last_filled(bucket))
    with fault:
        error = error_of(engine.to_generate)
    mode, gen_bytes = engine.mode, side.weights.live_bytes
    equal = same_weights(before, copy_weights(trainer))
    dist.barrier()
    engine, side = engine_of(trainer, made.registry)
    engine.to_generate()
    engine.to_train()
    again = same_weights(before, copy_weights(trainer))
    step(trainer, 1)
    again &= not same_weights(before, copy_weights(trainer))
    return Aftermath(error, mode, equal, gen_bytes, again)


def error_of(switch: Callable[[], object]) -> str:
    try:
        switch()
    except (HybridEngineError, RuntimeError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "none"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, "qwen3", tied=True)
    return tmp_path


@pytest.mark.parametrize(
    ("bucket", "is_full"),
    [
        pytest.param(BROKEN_BUCKET, True, id="all memory"),
        pytest.param(-1, False, id="one parameter of the last bucket, in which nobody sends anything"),
    ],
)
def test_no_memory_on_the_way_there(
    bucket: int, is_full: bool, folder: Path, run_ranks: RankLauncher
) -> None:
    by_rank = run_ranks(4, fail_on_the_way_there, folder, bucket, is_full)
    for rank, aftermath in enumerate(by_rank):
        assert aftermath.mode is Mode.TRAINING, aftermath.error
        assert aftermath.weights_equal
        assert aftermath.gen_bytes == 0
        assert aftermath.round_trips_again
        where = r"bucket (\d+) of (\d+) \(\S+ \.\.\.\) of megatron 1-4-1 -> vllm 1-1"
        if rank == BROKEN_RANK:
            found = re.match(
                rf"StorageError: rank 2: {where} failed: RuntimeError: {NO_MEMORY}; .* smaller",
                aftermath.error,
            )
        else:
            found = re.match(
                rf"TransferError: rank {rank}: .*bucket .*; rank 2 failed by itself in {where}: {NO_MEMORY}",
                aftermath.error,
            )
            assert "missing" not in aftermath.error
        assert found, aftermath.error
        # The error names the oldest bucket in flight; the one behind it is the one that found no memory.
        broken = bucket % int(found[2])
        assert is_full or int(found[1]) in (broken - 1, broken), aftermath.error


@dataclass(frozen=True)
class Way:
    """Events on the way back, or during a restore, on one rank."""

    errors: list[str]
    modes: list[Mode]
    weights_equal: bool
    """True if the weights are equal at the end."""
    gen_bytes: int


def fail_on_the_way_back(rank: int, folder: Path) -> Way:
    """No memory for one bucket, then none for another; then enough."""
    made = make(rank, folder)
    trainer, engine, side = made.trainer, made.engine, made.side
    before = copy_weights(trainer)
    engine.to_generate()
    errors, modes = [], []
    for bucket in (BROKEN_BUCKET, BROKEN_BUCKET + 2):
        with no_memory_for(trainer.weights, made.last_restored(bucket)):
            errors.append(error_of(engine.to_train))
        modes.append(engine.mode)
    engine.to_train()
    modes.append(engine.mode)
    equal = same_weights(before, copy_weights(trainer))
    step(trainer, 1)
    before = copy_weights(trainer)
    engine.to_generate()
    engine.to_train()  # from the first bucket again
    return Way(errors, modes, equal and same_weights(before, copy_weights(trainer)), side.weights.live_bytes)


def test_the_way_back_goes_on_where_it_failed(folder: Path, run_ranks: RankLauncher):
    for rank, way in enumerate(run_ranks(4, fail_on_the_way_back, folder)):
        for error, bucket in zip(way.errors, (BROKEN_BUCKET, BROKEN_BUCKET + 2), strict=True):
            found = re.match(
                rf"StorageError: rank {rank}: bucket (\d+) of \d+ .* vllm 1-1 -> megatron", error
            )
            assert found, error
            assert int(found[1]) in (bucket - 1, bucket)
        assert way.modes == [Mode.GENERATING] * 2 + [Mode.TRAINING]
        assert way.weights_equal
        assert way.gen_bytes == 0


def fail_to_restore(rank: int, folder: Path) -> Way:
    """One rank has no memory for a bucket, nor for restoring the training weights that it had given up."""
    made = make(rank, folder)
    trainer, engine, side = made.trainer, made.engine, made.side
    before = copy_weights(trainer)
    fault = contextlib.nullcontext()
    if rank == BROKEN_RANK:
        fault = contextlib.ExitStack()
        fault.enter_context(no_memory_for(side.weights, made.last_filled(BROKEN_BUCKET)))
        fault.enter_context(no_memory_for(trainer.weights, made.last_restored(-2)))
    with fault:
        errors = [error_of(engine.to_generate)]
    modes = [engine.mode]
    if rank == BROKEN_RANK:
        errors += [error_of(engine.to_generate), error_of(engine.to_train)]
        modes.append(engine.mode)
    equal = rank != BROKEN_RANK and same_weights(before, copy_weights(trainer))
    return Way(errors, modes, equal, side.weights.live_bytes)


def test_weights_that_are_lost_name_the_checkpoint(folder: Path, run_ranks: RankLauncher):
    for rank, way in enumerate(run_ranks(4, fail_to_restore, folder)):
        if rank != BROKEN_RANK:
            assert way.modes == [Mode.TRAINING]
            assert way.weights_equal
            assert way.gen_bytes == 0
            continue
        assert way.modes == [Mode.LOST, Mode.LOST]
        found = re.match(
            rf"StorageError: rank 2: a switch failed \(.* {NO_MEMORY}.*\), and the training weights could not be"
            rf" restored \(.*bucket (\d+) of (\d+) .*{NO_MEMORY}.*\); resume from {CHECKPOINT}$",
            way.errors[0],
        )
        assert found and int(found[1]) == int(found[2]) - 2, way.errors[0]
        for error in way.errors[1:]:
            assert re.match(
                rf"StorageError: the weights of rank 2 were lost .* resume from {CHECKPOINT}", error
            )


def fail_around_a_switch(rank: int, folder: Path) -> tuple[list[str], list[Mode], bool]:
    """Return (errors, modes, True if weights are whole) when one rank has no memory for a mode's other needs."""
    made = make(rank, folder)
    trainer, engine, side = made.trainer, made.engine, made.side
    before = copy_weights(trainer)
    leave = trainer.leave_training

    def leave_and_fail() -> None:
        leave()
        raise RuntimeError(NO_MEMORY)

    def generate() -> None:
        with engine.generating():
            modes.append(engine.mode)

    errors, modes = [], []
    with mock.patch.object(trainer, "leave_training", leave_and_fail if rank == BROKEN_RANK else leave):
        errors.append(error_of(engine.to_generate))
    modes.append(engine.mode)
    dist.barrier()
    engine, side = engine_of(trainer, made.registry)
    no_cache = mock.patch.object(side, "enter_generation", side_effect=RuntimeError(NO_MEMORY))
    with no_cache if rank == BROKEN_RANK else contextlib.nullcontext():
        errors.append(error_of(engine.to_generate))
    modes.append(engine.mode)
    engine.to_train()
    modes.append(engine.mode)
    with no_cache if rank == BROKEN_RANK else contextlib.nullcontext():
        errors.append(error_of(generate))
    modes.append(engine.mode)
    return errors, modes, same_weights(before, copy_weights(trainer))


def test_no_memory_for_what_a_mode_needs_besides_weights(folder: Path, run_ranks: RankLauncher):
    """No weight has moved, and the other ranks are informed; a missing KV cache can wait."""
    there_and_back = [Mode.TRAINING, Mode.GENERATING, Mode.TRAINING]
    for rank, (errors, modes, whole) in enumerate(run_ranks(4, fail_around_a_switch, folder)):
        assert whole
        if rank == BROKEN_RANK:
            assert errors == [f"RuntimeError: {NO_MEMORY}"] * 3
            assert modes == [*there_and_back, Mode.TRAINING]
        else:
            assert errors[1:] == ["none"] * 2
            assert re.match(rf"TransferError: rank {rank}: bucket \d+ .*", errors[0])
            assert f"; rank 2 failed by itself in leaving training: RuntimeError: {NO_MEMORY}" in errors[0]
            assert modes == [*there_and_back, Mode.GENERATING, Mode.TRAINING]
