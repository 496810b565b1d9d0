"""A bucket of a plan prepared for one rank: views, messages and storages, resolved once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridengine.errors import TransferError
from hybridengine.reshard.boxes import view_index
from hybridengine.reshard.plan import Bucket, Move, Pack, Place
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
    """Verification of boxes against their sources, after messages or copies.

    Digests are computed where boxes lie in their parameters, before packing and after unpacking, so that a wrong offset
    is detected as well as a changed bit.
    """

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
        """Compute the digests of the boxes to send."""
        if self.sent:
            taken = digests(self.sent).split([len(part) for part in self.signed])
            torch._foreach_copy_(self.signed, list(taken))

    def verify(self, rank: int) -> None:
        """Compare the received boxes with the sent ones.

        Raises:
            TransferError: names the tensor, interval, sender and receiver of a changed box.
        """
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
    staging_bytes: int
    gives_up: StoragePart
    local: Copies
    local_checks: Checks | None
    steps: tuple[Step, ...]
    """Steps of the bucket; empty if it has no messages."""


class ProgramBuilder:
    """Builds programs of one rank.

    Args:
        padded: destination parameters with padding, which is zero.
    """

    def __init__(
        self,
        rank: int,
        source: WeightStorage,
        destination: WeightStorage,
        padded: frozenset[str],
        transport: PointToPointTransport,
    ) -> None:
        self._rank, self._source, self._destination = rank, source, destination
        self._padded, self._transport = padded, transport
        storage = source if source.names else destination
        example = storage[storage.names[0]]
        self.device, self._dtype = example.device, example.dtype

    def storages(self, bucket: Bucket) -> tuple[StoragePart, StoragePart]:
        """Return (storages that the bucket fills, storages that it releases)."""
        filled = bucket.destinations.get(self._rank, ())
        return (
            self._destination.part(filled, self._padded.intersection(filled)),
            self._source.part(bucket.sources.get(self._rank, ())),
        )

    def build(self, bucket: Bucket, gives_up: StoragePart, checked: bool) -> Program:
        """Return the program of a bucket whose storages are allocated; torch cannot create views of empty storages."""
        staging = torch.empty(bucket.staging.get(self._rank, 0), dtype=self._dtype, device=self.device)
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
        return Program(
            staging=staged.part(staged.names),
            staging_bytes=staged.total_bytes,
            gives_up=gives_up,
            local=local,
            local_checks=self._local_checks(local, moves) if checked and moves else None,
            steps=steps,
        )

    def _step(self, bucket: Bucket, number: int, staging: _Parts, checked: bool) -> Step:
        outgoing = [pack for pack in bucket.sends(self._rank) if pack.step == number]
        incoming = [pack for pack in bucket.receives(self._rank) if pack.step == number]
        gather, spread = Copies([], []), Copies([], [])
        sends, receives = [], []
        for pack in outgoing:
            views = self._sent_views(pack)
            buffer = views[0]
            if not pack.sent_in_place:
                buffer = staging.take(pack.num_elements)
                gather.sources.extend(views)
                gather.targets.extend(_split(buffer, views))
            sends += [(peer, buffer) for peer in pack.receivers]
        for pack in incoming:
            views = self._received_views(pack)
            buffer = views[0]
            if not pack.received_in_place[pack.receivers.index(self._rank)]:
                buffer = staging.take(pack.num_elements)
                spread.sources.extend(_split(buffer, views))
                spread.targets.extend(views)
            receives.append((pack.source_rank, buffer))
        return Step(
            gather,
            self._transport.prepare(sends, receives),
            spread,
            self._checks(outgoing, incoming) if checked else None,
        )

    def _checks(self, outgoing: Sequence[Pack], incoming: Sequence[Pack]) -> Checks:
        signed, expected = (
            [self._no_digests(len(pack.moves[0])) for pack in packs] for packs in (outgoing, incoming)
        )
        return Checks(
            sent=[view for pack in outgoing for view in self._sent_views(pack)],
            signed=signed,
            received=[view for pack in incoming for view in self._received_views(pack)],
            expected=expected,
            moves=[move for pack in incoming for move in pack.moves_to(self._rank)],
            messages=self._transport.prepare(
                [
                    (peer, digest)
                    for pack, digest in zip(outgoing, signed, strict=True)
                    for peer in pack.receivers
                ],
                [(pack.source_rank, digest) for pack, digest in zip(incoming, expected, strict=True)],
                are_weights=False,
            ),
        )

    def _local_checks(self, local: Copies, moves: Sequence[Move]) -> Checks:
        taken = [self._no_digests(len(moves))]
        return Checks(local.sources, taken, local.targets, taken, list(moves))

    def _no_digests(self, count: int) -> Tensor:
        return torch.empty(count, DIGEST_SIZE, dtype=torch.int64, device=self.device)

    def _sent_views(self, pack: Pack) -> list[Tensor]:
        holder = self._destination if pack.step else self._source
        return [_view(holder, move.source, move) for move in pack.moves[0]]

    def _received_views(self, pack: Pack) -> list[Tensor]:
        return [_view(self._destination, move.destination, move) for move in pack.moves_to(self._rank)]


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
