"""One flipped bit: `verify` finds and locates it; without `verify`, wrong weights go unnoticed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridengine.backends.megatron.trainer import MegatronTrainer
from hybridengine.errors import HybridEngineError
from hybridengine.models.shapes import ModelShape
from hybridengine.reshard.plan import Pack, Plan
from hybridengine.topology.grid import Grid
from hybridengine.topology.links import NodeMap
from hybridengine.topology.sizes import TrainSizes
from hybridengine.weights.executor import Verify
from hybridengine.weights.hybrid_engine import HybridEngine, Mode
from hybridengine.weights.process_groups import ProcessGroups
from hybridengine.weights.programs import Checks
from tests.gloo import sharding_by_hand as by_hand
from tests.gloo.megatron_by_hand import gather_unsharded
from tests.gloo.megatron_training import copy_weights, make_trainer, same_weights
from tests.gloo.plain_generation import PlainGeneration, make_engine
from tests.gloo.ranks import RankLauncher
from tests.gloo.staged_transport import Stage, StagedTransport, stages_known
from tests.gloo.tiny_models import write_model

TIMEOUT_S = 3.0
BUCKET_ELEMENTS = 40_000
VICTIM = 2
SIZES, NODES = TrainSizes(2, 2, 1), NodeMap((2, 2))
"""Stages on different nodes: boxes travel in two steps. Ranks 2 and 3 have the second stage."""


@dataclass(frozen=True)
class Flip:
    """A bit that changes on its way to rank 2."""

    step: int
    in_place: bool
    """True if the message is received straight into the parameter, not through staging."""
    last_message: bool = False
    """True for the last message of its step, False for the first."""
    in_middle: bool = False
    """True for the first bucket that has such a message, False for the last one."""

    def message(self, plan: Plan) -> tuple[int, Pack]:
        """Return the index of the bucket, and the message."""
        found = [
            (index, pack)
            for index, bucket in enumerate(plan.buckets)
            for pack in bucket.packs
            if VICTIM in pack.receivers
            and pack.step == self.step
            and pack.received_in_place[pack.receivers.index(VICTIM)] is self.in_place
        ]
        bucket = found[0 if self.in_middle else -1][0]
        own = [pair for pair in found if pair[0] == bucket]
        return own[-1 if self.last_message else 0]

    def happen(self, stage: Stage, plan: Plan) -> None:
        """Flip the highest bit of the message's last element if this stage is its arrival."""
        index, message = self.message(plan)
        if (stage.name, stage.step, stage.is_back) != ("arrived", self.step, False):
            return
        if stage.bucket.tensors == plan.buckets[index].tensors:
            packs = [pack for pack in stage.bucket.packs if pack.step == self.step]
            incoming = [pack for pack in packs if VICTIM in pack.receivers]
            stage.received[incoming.index(message)][-1] ^= 0x80


FLIPS = [
    Flip(step=0, in_place=False),
    Flip(step=0, in_place=False, last_message=True),
    Flip(step=0, in_place=True),
    Flip(step=1, in_place=False),
    Flip(step=1, in_place=True, last_message=True),
    Flip(step=1, in_place=True, in_middle=True),
]


@dataclass(frozen=True)
class Outcome:
    """Switches of one engine on one rank, with a bit flipped in the last of them."""

    errors: list[str]
    """Error of each switch to generation; empty if it succeeded."""
    mode: Mode
    """Mode after the last switch."""
    wrong: list[str]
    """Generation parameters whose bits differ from the slices of the whole model, after the last switch."""
    training_whole: bool
    """True if the training weights are whole at the end, after the way back if the last switch had succeeded."""
    received_bytes: int
    """Bytes received in the last switch that succeeded."""
    message: Pack
    """The message with the flipped bit."""


@dataclass
class Switcher:
    """Creates engines for one trainer, and flips bits in their switches."""

    trainer: MegatronTrainer
    folder: Path

    def outcome(self, flip: Flip, verify: Verify, num_switches: int) -> Outcome:
        """Return the outcome when the bit flips in the last of `num_switches` switches to generation."""
        trainer, shape = self.trainer, self.trainer.shape
        number = 0

        def at_stage(stage: Stage) -> None:
            if number == num_switches and trainer.rank == VICTIM:
                flip.happen(stage, engine.plan)

        engine, side = engine_of(trainer, verify, lambda group: StagedTransport(group, at_stage))
        place = by_hand.gen_part(shape, 0, 0, SIZES.pp_size, 1, 1)
        expected = by_hand.generation_weights(shape, gather_unsharded(trainer), place)
        before, received_bytes = copy_weights(trainer), 0
        errors, wrong = [], list[str]()
        while number < num_switches:
            number += 1
            try:
                received_bytes = engine.to_generate().received_bytes
            except HybridEngineError as error:
                errors.append(str(error))
                continue
            errors.append("")
            wrong = [name for name in expected if not torch.equal(bits(side, name), bits_of(expected[name]))]
            if number < num_switches:
                engine.to_train()
        mode = engine.mode
        if mode is Mode.GENERATING:
            engine.to_train()
        dist.barrier()
        whole = same_weights(before, copy_weights(trainer))
        return Outcome(errors, mode, wrong, whole, received_bytes, flip.message(engine.plan)[1])


def engine_of(trainer: MegatronTrainer, verify: Verify, transport) -> tuple[HybridEngine, PlainGeneration]:
    """Return an engine with a shorter timeout than the trainer's."""
    return make_engine(
        trainer,
        "1-1",
        ProcessGroups(TIMEOUT_S),
        BUCKET_ELEMENTS,
        transport,
        verify=verify,
        nodes=NODES,
        direct_elements=1000,
    )


def bits(side: PlainGeneration, name: str) -> torch.Tensor:
    return bits_of(side.weights[name])


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def flip_in_turn(rank: int, folder: Path) -> dict[tuple[str, int], list[Outcome]]:
    """Return the outcomes of all flips for each (verify, switches)."""
    shape = ModelShape.from_folder(folder)
    switcher = Switcher(make_trainer(shape, Grid(SIZES), rank, ProcessGroups(), folder), folder)
    with stages_known():
        return {
            ("first", 1): [switcher.outcome(flip, Verify.FIRST, 1) for flip in FLIPS],
            ("first", 2): [switcher.outcome(flip, Verify.FIRST, 2) for flip in FLIPS[:-1]],
            ("always", 2): [switcher.outcome(flip, Verify.ALWAYS, 2) for flip in FLIPS[2:4]],
            ("never", 1): [switcher.outcome(flip, Verify.NEVER, 1) for flip in FLIPS[2:4]],
        }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, "qwen3", tied=True)
    return tmp_path


def test_a_flipped_bit_is_found_where_it_arrived(folder: Path, run_ranks: RankLauncher):
    by_rank = run_ranks(4, flip_in_turn, folder)
    for outcomes in by_rank:
        for one in [one for cases in outcomes.values() for one in cases]:
            assert one.training_whole
    for case in (("first", 2), ("never", 1)):
        for rank, outcomes in enumerate(by_rank):
            for one in outcomes[case]:
                assert one.errors == [""] * case[1]
                assert one.mode is Mode.GENERATING
                passed_on = rank == 3 and bool(one.wrong)  # a box that rank 2 forwards inside its node
                assert len(one.wrong) == (1 if rank == VICTIM or passed_on else 0)
    unnoticed = by_rank[VICTIM]["first", 2]
    for case, flips in (("first", 1), FLIPS), (("always", 2), FLIPS[2:4]):
        for flip, found in zip(flips, by_rank[VICTIM][case], strict=True):
            assert found.errors[:-1] == [""] * (case[1] - 1), "the switches before are right"
            assert found.mode is Mode.TRAINING
            assert_names_the_move(flip, found)
            if not flip.in_middle:  # the same parameter is wrong if the flip goes unnoticed
                assert f"({unnoticed[FLIPS.index(flip)].wrong[0]})" in found.errors[-1]


def assert_names_the_move(flip: Flip, found: Outcome) -> None:
    """Assert that the error names the last box of the message, its interval, its sender and its receiver."""
    move = found.message.moves_to(VICTIM)[-1]
    interval = re.escape(str([list(interval) for interval in move.box]))
    sender = found.message.source_rank
    assert sender == 3 if flip.step else sender != VICTIM
    assert re.search(
        rf"^rank 2: bucket \d+ of \d+ \(.*\) of megatron 2-2-1 -> vllm 1-1: {re.escape(move.tensor)}{interval}"
        rf" arrived at rank 2 \(\S+\) with other bits than it had at rank {sender} \(\S+\); memory or network",
        found.errors[-1],
    ), found.errors[-1]


def test_digests_are_not_counted_as_weights(folder: Path, run_ranks: RankLauncher):
    shape = ModelShape.from_folder(folder)
    for rank, found in enumerate(run_ranks(4, received_with_and_without, folder)):
        own = by_hand.train_part(shape, rank // 2, rank % 2, 2, 2)
        missing = by_hand.num_missing(shape, own, by_hand.gen_part(shape, 0, 0, 2, 1, 1))
        assert found == [4 * missing] * 4


def received_with_and_without(rank: int, folder: Path) -> list[int]:
    """Return the received bytes of two switches that are verified, and of two that are not."""
    shape = ModelShape.from_folder(folder)
    trainer = make_trainer(shape, Grid(SIZES), rank, ProcessGroups(), folder)
    found = []
    for verify in (Verify.ALWAYS, Verify.NEVER):
        engine, _ = make_engine(trainer, "1-1", ProcessGroups(), BUCKET_ELEMENTS, verify=verify, nodes=NODES)
        for _ in range(2):
            found.append(engine.to_generate().received_bytes)
            engine.to_train()
    return found


@contextmanager
def one_wrong_copy() -> Iterator[list[str]]:
    """While open, the first copy that is checked has a flipped bit; yields its tensor and parameter."""
    verify, found = Checks.verify, []

    def flip_and_verify(checks: Checks, rank: int) -> None:
        if not found and checks.messages is None:
            found.extend([checks.moves[-1].tensor, checks.moves[-1].destination.parameter])
            target = checks.received[-1]
            target[(0,) * target.dim()] *= -1  # flips the sign
        verify(checks, rank)

    with mock.patch.object(Checks, "verify", flip_and_verify):
        yield found


def copy_wrongly(rank: int, folder: Path) -> dict[str, list[str]]:
    """Return the errors of wrong copies, on one rank to generation and on every rank back, with the expected names."""
    shape = ModelShape.from_folder(folder)
    trainer = make_trainer(shape, Grid(SIZES), rank, ProcessGroups(), folder)
    before, answer = copy_weights(trainer), {}
    engine, _ = make_engine(trainer, "1-1", ProcessGroups(TIMEOUT_S), BUCKET_ELEMENTS, verify=Verify.ALWAYS)
    wrong = one_wrong_copy() if rank == VICTIM else nullcontext([])
    with wrong as names, pytest.raises(HybridEngineError) as raised:
        engine.to_generate()
    answer["there"] = [str(raised.value), *names]
    assert engine.mode is Mode.TRAINING
    assert same_weights(before, copy_weights(trainer))
    dist.barrier()
    engine, _ = make_engine(trainer, "1-1", ProcessGroups(TIMEOUT_S), BUCKET_ELEMENTS)
    engine.to_generate()
    with one_wrong_copy() as names, pytest.raises(HybridEngineError) as raised:
        engine.to_train()
    answer["back"] = [str(raised.value), *names]
    assert engine.mode is Mode.GENERATING
    engine.to_train()  # from the copies that are right
    assert same_weights(before, copy_weights(trainer))
    return answer


def test_a_wrong_copy_is_found_there_and_back(folder: Path, run_ranks: RankLauncher):
    for rank, answer in enumerate(run_ranks(4, copy_wrongly, folder)):
        for way, kinds in (("there", "megatron 2-2-1 -> vllm 1-1"), ("back", "vllm 1-1 -> megatron 2-2-1")):
            error, *named = answer[way]
            if rank != VICTIM and way == "there":
                assert re.search(r"rank 2 failed by itself in bucket \d+ of .*with other bits", error), error
                continue
            tensor, parameter = named
            assert re.search(
                rf"^rank {rank}: bucket \d+ of \d+ \(.*\) of {kinds}: {re.escape(tensor)}\[.*\] arrived at rank {rank}"
                rf" \({re.escape(parameter)}\) with other bits than it had at rank {rank} ",
                error,
            ), error
