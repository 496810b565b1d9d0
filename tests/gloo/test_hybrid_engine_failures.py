"""Failures in the middle of a switch: ranks die, hang or run out of memory, and no weight is lost."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.errors import TransferError
from hybridengine.model_shapes import ModelShape
from hybridengine.runtime.hybrid_engine import HybridEngine, Mode
from hybridengine.runtime.process_groups import ProcessGroups
from hybridengine.runtime.storage import WeightStorage
from hybridengine.runtime.transport import Message, PointToPointTransport
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import TrainSizes
from tests.gloo.megatron_training import copy_weights, make_trainer, same_weights, step
from tests.gloo.plain_generation import PlainGeneration, make_engine
from tests.gloo.ranks import RankLauncher
from tests.gloo.tiny_models import write_model

TIMEOUT_S = 5.0
BUCKET_ELEMENTS = 20_000
BROKEN_RANK, BROKEN_BUCKET = 2, 3
SIZES = TrainSizes(1, 4, 1)
"""Every bucket has messages between all ranks."""


@dataclass(frozen=True)
class Aftermath:
    """What a surviving rank has after a failed switch."""

    error: str
    seconds: float
    mode: Mode
    weights_equal: bool
    gen_bytes: int
    gradients_are_back: bool
    num_buckets: int


class BreakingTransport(PointToPointTransport):
    """Does something else instead of taking part in one bucket."""

    def __init__(self, group: dist.ProcessGroup, instead: Callable[[], None]) -> None:
        super().__init__(group)
        self._instead = instead
        self._bucket = 0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], what: str) -> None:
        if dist.get_rank() == BROKEN_RANK and self._bucket == BROKEN_BUCKET:
            self._instead()
        self._bucket += 1
        super().exchange(sends, receives, what)


def die() -> None:
    os._exit(1)


def hang() -> None:
    time.sleep(2 * TIMEOUT_S)


def make_trainer_of(rank: int, folder: Path) -> MegatronTrainer:
    """A trainer with some gradients and optimizer state."""
    shape = ModelShape.from_folder(folder)
    trainer = make_trainer(shape, Grid(SIZES), rank, ProcessGroups(), folder)
    step(trainer, 0)
    return trainer


def break_a_switch(rank: int, folder: Path, instead: Callable[[], None]) -> Aftermath:
    trainer = make_trainer_of(rank, folder)
    engine, side = make_engine(
        trainer,
        "1-1",
        ProcessGroups(TIMEOUT_S),
        BUCKET_ELEMENTS,
        lambda group: BreakingTransport(group, instead),
    )
    return attempt(trainer, engine, side)


def attempt(trainer: MegatronTrainer, engine: HybridEngine, side: PlainGeneration) -> Aftermath:
    before, gradient_bytes = copy_weights(trainer), trainer.gradient_bytes
    began = time.monotonic()
    error = "none"
    try:
        engine.to_generate()
    except (TransferError, MemoryError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Aftermath(
        error=error,
        seconds=time.monotonic() - began,
        mode=engine.mode,
        weights_equal=same_weights(before, copy_weights(trainer)),
        gen_bytes=side.weights.live_bytes,
        gradients_are_back=trainer.gradient_bytes == gradient_bytes > 0,
        num_buckets=len(engine.plan.buckets),
    )


def assert_whole(aftermath: Aftermath) -> None:
    assert aftermath.mode is Mode.TRAINING
    assert aftermath.weights_equal
    assert aftermath.gen_bytes == 0
    assert aftermath.gradients_are_back
    assert aftermath.num_buckets > BROKEN_BUCKET + 1, "the failure is in the middle"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, "qwen3", tied=True)
    return tmp_path


@pytest.mark.parametrize("instead", [die, hang])
def test_a_peer_that_dies_or_hangs(instead: Callable[[], None], folder: Path, run_ranks: RankLauncher):
    may_die = [BROKEN_RANK] if instead is die else []
    by_rank = run_ranks(4, break_a_switch, folder, instead, may_die=may_die, timeout_s=90)
    if instead is die:
        assert by_rank[BROKEN_RANK] is None
    for rank, aftermath in enumerate(by_rank):
        if aftermath is None:
            continue
        assert_whole(aftermath)
        found = re.search(
            r"TransferError: rank (\d): bucket (\d+) of (\d+) .* megatron 1-4-1 -> vllm 1-1", aftermath.error
        )
        assert found, aftermath.error
        assert int(found[1]) == rank
        # A rank that dies resets its connections, which can also cut off what a slow peer has not read yet.
        assert int(found[2]) in (BROKEN_BUCKET - 1, BROKEN_BUCKET)
        if rank != BROKEN_RANK:
            assert aftermath.seconds < (TIMEOUT_S if instead is die else 2 * TIMEOUT_S) + 10.0


def out_of_memory_at(storage: WeightStorage, call: int):
    """While open, taking memory from `storage` fails once, at the given call and after a part of it was taken."""
    take = storage.materialise
    calls = 0

    def materialise(names: Iterable[str] | None = None, zero: Iterable[str] = ()) -> None:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            take(list(names or ())[:1], zero)
            raise MemoryError("no memory for this bucket")
        take(names, zero)

    return mock.patch.object(storage, "materialise", materialise)


def run_out_of_memory_and_recover(rank: int, folder: Path) -> tuple[Aftermath, bool, list[bool]]:
    """(after one rank has no memory on the way there, next round trip is whole, same for a failure on the way back)."""
    trainer = make_trainer_of(rank, folder)
    engine, side = make_engine(trainer, "1-1", ProcessGroups(TIMEOUT_S), BUCKET_ELEMENTS)
    if rank == BROKEN_RANK:
        with out_of_memory_at(side.weights, BROKEN_BUCKET):
            aftermath = attempt(trainer, engine, side)
    else:
        aftermath = attempt(trainer, engine, side)
    dist.barrier()

    before = copy_weights(trainer)
    engine, side = make_engine(
        trainer, "1-1", ProcessGroups(), BUCKET_ELEMENTS
    )  # timeouts have closed the old groups
    engine.to_generate()
    engine.to_train()
    recovered = same_weights(before, copy_weights(trainer))

    engine.to_generate()
    with out_of_memory_at(trainer.weights, BROKEN_BUCKET):
        try:
            engine.to_train()
            back = [False]
        except MemoryError:
            back = [engine.mode is Mode.GENERATING]
    report = engine.to_train()
    back += [
        same_weights(before, copy_weights(trainer)),
        report.redundant_bytes == 0,
        side.weights.live_bytes == 0,
    ]
    step(trainer, 1)
    before = copy_weights(trainer)
    engine.to_generate()
    engine.to_train()  # from the first bucket again
    back.append(same_weights(before, copy_weights(trainer)))
    return aftermath, recovered, back


def test_no_memory_for_a_bucket(folder: Path, run_ranks: RankLauncher):
    for rank, (aftermath, recovered, back) in enumerate(
        run_ranks(4, run_out_of_memory_and_recover, folder, timeout_s=90)
    ):
        assert_whole(aftermath)
        assert aftermath.error.startswith("MemoryError" if rank == BROKEN_RANK else "TransferError"), (
            aftermath.error
        )
        assert recovered
        assert all(back), back
