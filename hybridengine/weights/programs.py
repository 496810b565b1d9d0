"""A bucket of a plan prepared for one rank: views, messages and storages, resolved once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridengine.errors import TransferError
from hybridengine.families.family import is_float32
from hybridengine.reshard.boxes import view_index
from hybridengine.reshard.plan import Bucket, Move, Place
from hybridengine.weights.digests import DIGEST_SIZE, digests
from hybridengine.weights.storage import StoragePart, WeightStorage
from hybridengine.weights.transport import Messages, PointToPointTransport


@dataclass(frozen=True)
class Copies:
    """Pairs of tensors to copy."""

    sources: list[Tensor]
    targets: list[Tensor]

    def run(self) -> None:
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)


@dataclass(frozen=True)
class Checks:
    """Verification of boxes by digests, which are computed in the parameters and so detect wrong offsets as well."""

    sent: list[Tensor]
    """Boxes that this rank sends or copies, in message order."""
    signed: list[Tensor]
    """Digests of `sent` for each message, [moves, 2]."""
    received: list[Tensor]
    expected: list[Tensor]
    """Digests of `received` as computed by the senders."""
    moves: list[Move]
    """Moves of `received`."""
    messages: Messages | None = None
    """Messages that transfer `signed` to `expected`; None if both are the same tensors."""

    def sign(self) -> None:
        if self.sent:
            taken = digests(self.sent).split([len(part) for part in self.signed])
            torch._foreach_copy_(self.signed, list(taken))

    def verify(self, rank: int) -> None:
        """Raise TransferError with tensor, interval, sender and receiver if a received box differs from the sent one."""
        if not self.received:
            return
        wrong = (digests(self.received) != torch.cat(self.expected)).any(dim=1).nonzero().flatten().tolist()
        if not wrong:
            return
        move = self.moves[wrong[0]]
        more = f" (and {len(wrong) - 1} more boxes)" if len(wrong) > 1 else ""
        raise TransferError(
            f"{move.tensor}{[list(interval) for interval in move.box]} arrived at rank {rank}"
            f" ({move.destination.parameter}) with other bits than it had at rank {move.source.rank}"
            f" ({move.source.parameter}){more}; memory or network between them is at fault, or weights were written to"
            " during the switch"
        )


@dataclass(frozen=True)
class Step:
    """Messages that start together."""

    gather: Copies
    """Copies into staging, before the messages are sent."""
    messages: Messages
    spread: Copies
    """Copies out of staging, after the messages have arrived."""
    checks: Checks | None


@dataclass(frozen=True)
class Program:
    """One rank's part in a bucket. Its tensors stay valid while their storages are released and reallocated."""

    staging: StoragePart
    local: Copies
    local_checks: Checks | None
    steps: tuple[Step, ...]
    """Steps of the bucket; empty if it has no messages."""


class ProgramBuilder:
    """Builds programs of one rank."""

    def __init__(
        self, rank: int, source: WeightStorage, destination: WeightStorage, transport: PointToPointTransport
    ) -> None:
        self._rank, self._source, self._destination = rank, source, destination
        self._transport = transport
        storage = source if source.names else destination
        # A bucket is of one type (`reshard.compiler`).
        example = storage[min(storage.names, key=is_float32)]
        self.device, self._dtype = example.device, example.dtype

    def build(self, bucket: Bucket, checked: bool) -> Program:
        """Return the program of a bucket whose storages are allocated; torch cannot create views of empty storages."""
        dtype = torch.float32 if is_float32(bucket.tensors[0]) else self._dtype
        staging = torch.empty(bucket.staging.get(self._rank, 0), dtype=dtype, device=self.device)
        parts = _Parts(staging)
        steps = tuple(
            self._step(bucket, step, parts, checked)
            for step in range(bucket.num_steps if bucket.packs else 0)
        )
        staged = WeightStorage({"staging": staging})
        staged.release()
        moves = bucket.local(self._rank)
        local = Copies(
            [_view(self._source, move.source, move) for move in moves],
            [_view(self._destination, move.destination, move) for move in moves],
        )
        local_checks = None
        if checked and moves:
            taken = [self._no_digests(len(moves))]
            local_checks = Checks(local.sources, taken, local.targets, taken, moves)
        return Program(staged.part(staged.names), local, local_checks, steps)

    def _step(self, bucket: Bucket, number: int, staging: _Parts, checked: bool) -> Step:
        gather, spread, checks = Copies([], []), Copies([], []), Checks([], [], [], [], [])
        sends, receives, digest_sends, digest_receives = [], [], [], []
        for pack in bucket.packs:
            if pack.step == number and pack.source_rank == self._rank:
                holder = self._destination if number else self._source
                views = [_view(holder, move.source, move) for move in pack.moves[0]]
                buffer, digest = views[0], self._no_digests(len(views))
                if not pack.sent_in_place:
                    buffer = staging.take(pack.num_elements)
                    gather.sources.extend(views)
                    gather.targets.extend(_split(buffer, views))
                sends += [(peer, buffer) for peer in pack.receivers]
                digest_sends += [(peer, digest) for peer in pack.receivers]
                checks.sent.extend(views)
                checks.signed.append(digest)
            elif pack.step == number and self._rank in pack.receivers:
                moves = pack.moves_to(self._rank)
                views = [_view(self._destination, move.destination, move) for move in moves]
                buffer, digest = views[0], self._no_digests(len(views))
                if not pack.received_in_place[pack.receivers.index(self._rank)]:
                    buffer = staging.take(pack.num_elements)
                    spread.sources.extend(_split(buffer, views))
                    spread.targets.extend(views)
                receives.append((pack.source_rank, buffer))
                digest_receives.append((pack.source_rank, digest))
                checks.received.extend(views)
                checks.expected.append(digest)
                checks.moves.extend(moves)
        messages = self._transport.prepare(sends, receives)
        if checked:
            signatures = self._transport.prepare(digest_sends, digest_receives, are_weights=False)
            return Step(gather, messages, spread, replace(checks, messages=signatures))
        return Step(gather, messages, spread, None)

    def _no_digests(self, count: int) -> Tensor:
        return torch.empty(count, DIGEST_SIZE, dtype=torch.int64, device=self.device)


class _Parts:
    """Allocator of consecutive parts of a staging buffer."""

    def __init__(self, staging: Tensor) -> None:
        self._staging, self._taken = staging, 0

    def take(self, num_elements: int) -> Tensor:
        part = self._staging.narrow(0, self._taken, num_elements)
        self._taken += num_elements
        return part


def _view(storage: WeightStorage, place: Place, move: Move) -> Tensor:
    return storage[place.parameter][view_index(place.offset, move.shape)]


def _split(buffer: Tensor, views: list[Tensor]) -> list[Tensor]:
    """Return consecutive parts of a flat buffer, shaped like `views`."""
    parts = torch.split(buffer, [view.numel() for view in views])
    return [part.view(view.shape) for part, view in zip(parts, views, strict=True)]
