"""A rank dies or hangs at each stage of a switch: the others end with an error that names it, and keep whole weights."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from hybridengine.errors import TransferError
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.grid import Grid
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights import transport
from hybridengine.weights.hybrid_engine import HybridEngine, Mode
from hybridengine.weights.process_groups import ProcessGroups
from tests.gloo import sharding_by_hand as by_hand
from tests.gloo.megatron_by_hand import gather_unsharded
from tests.gloo.megatron_training import copy_weights, make_trainer, same_weights, step
from tests.gloo.plain_generation import make_engine
from tests.gloo.ranks import RankLauncher
from tests.gloo.staged_transport import Stage, StagedTransport, stages_known
from tests.gloo.tiny_models import write_model

TIMEOUT_S = 3.0
FROZEN_S = 20.0
BROKEN_RANK = 2
SIZES, NODES = TrainSizes(2, 2, 1), NodeMap((2, 2))
"""Stages on different nodes: boxes travel in two steps, and all ranks send and receive."""
BUCKET_ELEMENTS = 40_000


@dataclass(frozen=True)
class Break:
    """A fault of one rank, and its place in a switch."""

    stage: str
    """`before`: never begins. `post`, `arrived`, `copy`: at this stage of a bucket. `after`: its switch is complete."""
    bucket: int = 0
    step: int = 0
    back: bool = False
    """True if the fault occurs on the way back."""
    hangs: bool = False
    """True if the rank sleeps until the others have given up, instead of dying."""
    hosts_store: bool = False
    """True if the store with the notes dies with the rank."""
    freezes: bool = False
    """True if the whole process stops, its threads included, and is killed after the others should have ended."""

    def is_at(self, stage: Stage, engine: HybridEngine) -> bool:
        here = (stage.name, stage.bucket.tensors, stage.step, stage.is_back)
        return here == (self.stage, engine.plan.buckets[self.bucket].tensors, self.step, self.back)

    def happen(self) -> None:
        if self.freezes:
            subprocess.Popen(["sh", "-c", f"sleep {FROZEN_S}; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if not self.hangs:
            os._exit(1)
        time.sleep(4 * TIMEOUT_S)

    def store(self, rank: int) -> contextlib.AbstractContextManager[object]:
        """While open, notes are left in a store of the broken rank, if it hosts one."""
        if not self.hosts_store:
            return contextlib.nullcontext()
        is_host = rank == BROKEN_RANK
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if is_host else None
        ports = [store.port if store else 0]
        dist.broadcast_object_list(ports, src=BROKEN_RANK)
        found = store or dist.TCPStore("127.0.0.1", ports[0], is_master=False)
        return mock.patch.object(transport, "store_of", return_value=found)

    def __str__(self) -> str:
        where = f" bucket {self.bucket} step {self.step}" if self.stage in ("post", "arrived", "copy") else ""
        back = " on the way back" if self.back else ""
        return f"{'hangs' if self.hangs else 'dies'} {self.stage}{where}{back}"


@dataclass(frozen=True)
class Aftermath:
    """State of a rank after a switch that one rank has broken."""

    error: str
    seconds: float
    """Duration of the switch."""
    mode: Mode
    weights_equal: bool
    """True if the weights of its mode are correct: the training weights, or the slices of the whole model."""
    other_bytes: int
    """Bytes of the other mode's weights."""
    returned_whole: bool
    """True if the training weights are bitwise what they were, after the way back if the switch had succeeded."""
    num_buckets: int
    num_steps: int
    broken_sends: list[int]
    """Buckets in which the broken rank sends something."""


def break_a_switch(rank: int, folder: Path, case: Break) -> Aftermath:
    shape = ModelShape.from_folder(folder)
    trainer = make_trainer(shape, Grid(SIZES), rank, ProcessGroups(), folder)
    step(trainer, 0)  # creates gradients and optimizer state
    tensors = gather_unsharded(trainer)

    def at_stage(stage: Stage) -> None:
        if rank == BROKEN_RANK and case.is_at(stage, engine):
            case.happen()

    with stages_known(), case.store(rank):
        engine, side = make_engine(
            trainer,
            "1-1",
            ProcessGroups(TIMEOUT_S),
            BUCKET_ELEMENTS,
            lambda group: StagedTransport(group, at_stage),
            nodes=NODES,
            direct_elements=1000,
        )
        before = copy_weights(trainer)
        dist.barrier()
        if rank == BROKEN_RANK and case.stage == "before":
            case.happen()
        started = time.monotonic()
        error = attempt(engine)
        seconds = time.monotonic() - started
        if rank == BROKEN_RANK and case.stage == "after":
            case.happen()
        mode = engine.mode
        if mode is Mode.GENERATING:
            expected = by_hand.generation_weights(shape, tensors, by_hand.gen_part(shape, 0, 0, 2, 1, 1))
            equal = same_weights({name: side.weights[name] for name in side.weights.names}, expected)
            other_bytes = trainer.weights.live_bytes
            engine.to_train()
        else:
            equal, other_bytes = same_weights(before, copy_weights(trainer)), side.weights.live_bytes
    return Aftermath(
        error,
        seconds,
        mode,
        equal,
        other_bytes,
        same_weights(before, copy_weights(trainer)),
        len(engine.plan.buckets),
        engine.plan.num_steps,
        [
            index
            for index, bucket in enumerate(engine.plan.buckets)
            if any(pack.source_rank == BROKEN_RANK for pack in bucket.packs)
        ],
    )


def attempt(engine: HybridEngine) -> str:
    try:
        engine.to_generate()
    except TransferError as raised:
        return str(raised)
    return ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, "qwen3", tied=True)
    return tmp_path


MIDDLE = 2
"""A bucket with others before and after it."""
WHILE_OTHERS_WAIT = [
    Break("before"),
    Break("post", 0),
    Break("post", MIDDLE),
    Break("post", MIDDLE, step=1),
    Break("arrived", MIDDLE),
    Break("arrived", MIDDLE, step=1),
    Break("before", hangs=True),
    Break("post", MIDDLE, step=1, hangs=True),
]
WHILE_NOBODY_WAITS = [
    Break("after"),
    Break("copy", MIDDLE, back=True),
]


@pytest.mark.parametrize("case", WHILE_OTHERS_WAIT, ids=str)
def test_others_name_the_rank_and_keep_their_training_weights(
    case: Break, folder: Path, run_ranks: RankLauncher
):
    by_rank = run_ranks(4, break_a_switch, folder, case, may_die=[BROKEN_RANK])
    assert (by_rank[BROKEN_RANK] is None) is not case.hangs
    failed_in = []
    for rank, aftermath in enumerate(by_rank):
        if aftermath is None:
            continue
        assert aftermath.mode is Mode.TRAINING
        assert aftermath.weights_equal
        assert aftermath.returned_whole
        assert aftermath.other_bytes == 0
        assert aftermath.num_buckets > MIDDLE + 2
        assert aftermath.num_steps == 2
        found = re.match(
            r"rank (\d): bucket (\d+) of (\d+) \(\S+ \.\.\.\) of megatron 2-2-1 -> vllm 1-1: messages with ranks",
            aftermath.error,
        )
        assert found, aftermath.error
        assert (int(found[1]), int(found[3])) == (rank, aftermath.num_buckets)
        missing = re.findall(r"missing ranks: (\[.*?\])", aftermath.error)
        assert missing == ([] if rank == BROKEN_RANK else [f"[{BROKEN_RANK}]"]), aftermath.error
        failed_in.append(int(found[2]))
    # A peer may lose messages that it has not read yet; with two buckets in flight, the next one's may have been sent.
    sent_before = case.bucket + (2 if case.stage == "arrived" or case.step else 0)
    first_missed = min(bucket for bucket in by_rank[0].broken_sends if bucket >= sent_before)
    assert case.bucket - 1 <= min(failed_in) <= first_missed


@pytest.mark.parametrize("freezes", [False, True], ids=["dies", "freezes"])
def test_the_store_dies_with_the_rank(folder: Path, run_ranks: RankLauncher, freezes: bool):
    """Without notes no rank can know which one is missing, and errors do not claim to; a frozen rank answers nothing."""
    case = Break("post", MIDDLE, hosts_store=True, freezes=freezes)
    by_rank = run_ranks(4, break_a_switch, folder, case, may_die=[BROKEN_RANK])
    assert by_rank[BROKEN_RANK] is None
    for rank, aftermath in enumerate(by_rank):
        if aftermath is None:
            continue
        assert aftermath.mode is Mode.TRAINING
        assert aftermath.weights_equal
        assert re.match(rf"rank {rank}: bucket \d+ of .* messages with ranks \[.*\] failed", aftermath.error)
        assert "the rank that hosts the store is missing" in aftermath.error
        assert "missing ranks" not in aftermath.error
        assert aftermath.seconds < FROZEN_S - 1, "nobody waits until the frozen rank is killed"


@pytest.mark.parametrize("case", WHILE_NOBODY_WAITS, ids=str)
def test_others_that_have_all_they_need_go_on(case: Break, folder: Path, run_ranks: RankLauncher):
    """A rank dies after it has sent everything: each rank that has received everything generates, and comes back."""
    by_rank = run_ranks(4, break_a_switch, folder, case, may_die=[BROKEN_RANK])
    assert by_rank[BROKEN_RANK] is None
    for rank, aftermath in enumerate(by_rank):
        if aftermath is None:
            continue
        assert aftermath.weights_equal
        assert aftermath.other_bytes == 0
        assert aftermath.returned_whole
        if aftermath.mode is Mode.TRAINING:  # the connection was cut before the last message had been read
            assert f"rank {rank}: the meeting after bucket {aftermath.num_buckets - 1} of" in aftermath.error
            assert f"missing ranks: [{BROKEN_RANK}]" in aftermath.error
        else:
            assert aftermath.mode is Mode.GENERATING
            assert not aftermath.error
