"""A transport that notifies a test of each stage of a switch, so that the test can inject a fault at that point."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from hybridengine.reshard.plan import Bucket
from hybridengine.weights.programs import Copies, Program, ProgramBuilder
from hybridengine.weights.transport import Messages, Pending, PointToPointTransport


@dataclass(frozen=True)
class Stage:
    """Progress of a rank: about to post a bucket's messages of some step (`post`), or all have arrived (`arrived`).

    A bucket without messages has one stage, before it is copied (`copy`).
    """

    name: str
    bucket: Bucket
    step: int
    received: tuple[Tensor, ...]
    """Destinations of the messages, as bytes: staging buffers, or parts of parameters."""

    @property
    def is_back(self) -> bool:
        """True on the way back to training, where nothing moves between ranks."""
        return not self.bucket.packs


class StagedTransport(PointToPointTransport):
    """Calls `at_stage` with every stage of every switch of its rank; digests are not stages."""

    def __init__(self, group: dist.ProcessGroup, at_stage: Callable[[Stage], None]) -> None:
        super().__init__(group)
        self._at_stage = at_stage

    def post(self, messages: Messages) -> Pending:
        self.reach("post", messages)
        pending = super().post(messages)
        return _StagedPending(self, messages, pending)

    def reach_copy(self, bucket: Bucket) -> None:
        self._at_stage(Stage("copy", bucket, 0, ()))

    def reach(self, name: str, messages: Messages) -> None:
        if id(messages) in _buckets:
            _, bucket, step = _buckets[id(messages)]
            received = tuple(each.tensor for each in messages.operations if each.op is dist.irecv)
            self._at_stage(Stage(name, bucket, step, received))


@dataclass(frozen=True)
class _StagedCopies(Copies):
    """Copies of a bucket that has no messages."""

    transport: StagedTransport
    bucket: Bucket

    def run(self) -> None:
        self.transport.reach_copy(self.bucket)
        super().run()


class _StagedPending(Pending):
    def __init__(self, transport: StagedTransport, messages: Messages, pending: Pending) -> None:
        self._staged, self._posted, self._pending = transport, messages, pending

    def wait(self) -> int:
        received_bytes = self._pending.wait()
        self._staged.reach("arrived", self._posted)
        return received_bytes

    def abandon(self) -> None:
        self._pending.abandon()


_buckets: dict[int, tuple[Messages, Bucket, int]] = {}
"""id of messages -> (the messages, their bucket, step); kept, as digests could get the id of messages that are gone."""


@contextlib.contextmanager
def stages_known() -> Iterator[None]:
    """While open, programs that are built record the bucket and step of their messages."""
    build = ProgramBuilder.build

    def build_and_note(builder: ProgramBuilder, bucket: Bucket, *args: Any) -> Program:
        program = build(builder, bucket, *args)
        for number, step in enumerate(program.steps):
            _buckets[id(step.messages)] = step.messages, bucket, number
        transport = builder._transport
        if program.steps or not isinstance(transport, StagedTransport):
            return program
        local = _StagedCopies(program.local.sources, program.local.targets, transport, bucket)
        return replace(program, local=local)

    with mock.patch.object(ProgramBuilder, "build", build_and_note):
        yield
    _buckets.clear()
