"""A plan: the moves that convert one layout into another, in ordered buckets of bounded size.

A plan is immutable, deterministic and printable: every rank compiles the same plan from the same layouts, so plans are
never sent. `compiler` compiles them, `audit` verifies them, `cost` computes their cost, `weights.executor` executes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from msgspec import msgpack

from hybridengine.reshard.boxes import Box, extents, num_elements
from hybridengine.reshard.layout import Layout


class Place(NamedTuple):
    """Position of the first element of a box: rank, parameter, and index in it."""

    rank: int
    parameter: str
    offset: tuple[int, ...]


class Move(NamedTuple):
    """Copy of one box of a logical tensor from a place on one rank to a place in the destination layout."""

    tensor: str
    box: Box
    source: Place
    destination: Place
    step: int = 0
    """0 for a transfer out of the source layout; 1 for forwarding by a rank that received the box in step 0, out of its
    destination parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        return extents(self.box)

    @property
    def num_elements(self) -> int:
        return num_elements(self.box)

    @property
    def is_local(self) -> bool:
        """True if the box stays on its rank: a copy in memory, without network traffic."""
        return self.source.rank == self.destination.rank


@dataclass(frozen=True, slots=True)
class Pack:
    """Boxes of one rank that are sent as one message to the same receivers."""

    step: int
    source_rank: int
    receivers: tuple[int, ...]
    moves: tuple[tuple[Move, ...], ...]
    """Moves of the message for each receiver, in message order; all receivers have the same sources."""
    num_elements: int
    sent_in_place: bool
    """True if the message is one contiguous region of the sender's parameter, and is sent from it without staging."""
    received_in_place: tuple[bool, ...]
    """For each receiver, True if the message is one contiguous region of its parameter, and is received into it."""

    def moves_to(self, receiver: int) -> tuple[Move, ...]:
        return self.moves[self.receivers.index(receiver)]


@dataclass(frozen=True)
class Bucket:
    """Moves that are executed together, and the parameters that they fill and release."""

    tensors: tuple[str, ...]
    """Logical tensors of the bucket; each tensor is in exactly one bucket."""
    moves: tuple[Move, ...]
    packs: tuple[Pack, ...]
    """Messages for the moves between ranks; a box is packed once for all of its receivers."""
    sources: dict[int, tuple[str, ...]]
    """Rank -> source parameters that are released once the bucket has arrived."""
    destinations: dict[int, tuple[str, ...]]
    """Rank -> destination parameters that the bucket fills completely."""
    overlaps: bool = False
    """True if the bucket's messages may be sent before the previous bucket has arrived and is unpacked."""

    @property
    def num_steps(self) -> int:
        """2 if boxes are forwarded, else 1."""
        return 1 + max((pack.step for pack in self.packs), default=0)

    def local(self, rank: int) -> list[Move]:
        return [move for move in self.moves if move.is_local and move.source.rank == rank]

    @cached_property
    def staging(self) -> dict[int, int]:
        """Rank -> elements of messages that are packed before sending or unpacked after receipt."""
        staged: dict[int, int] = {}
        for pack in self.packs:
            if not pack.sent_in_place:
                staged[pack.source_rank] = staged.get(pack.source_rank, 0) + pack.num_elements
            for receiver, in_place in zip(pack.receivers, pack.received_in_place, strict=True):
                if not in_place:
                    staged[receiver] = staged.get(receiver, 0) + pack.num_elements
        return staged


@dataclass(frozen=True)
class Plan:
    """All moves from `source` to `destination` among the ranks of one domain."""

    source: Layout
    destination: Layout
    ranks: tuple[int, ...]
    """Ranks of the domain; all moves stay within it."""
    buckets: tuple[Bucket, ...]

    @property
    def moves(self) -> Iterator[Move]:
        return (move for bucket in self.buckets for move in bucket.moves)

    @property
    def num_steps(self) -> int:
        """2 if any box is sent to a node once and forwarded within it, else 1."""
        return max((bucket.num_steps for bucket in self.buckets), default=1)

    def retained(self, rank: int) -> tuple[str, ...]:
        """Return the source parameters that `rank` keeps because its destination shard does not contain all of them."""
        released = {name for bucket in self.buckets for name in bucket.sources.get(rank, ())}
        names = (parameter.name for parameter in self.source.held(rank).parameters)
        return tuple(name for name in names if name not in released)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of all moves and their grouping: two plans are equal if and only if their digests are."""
        text = hashlib.sha256()
        for bucket in self.buckets:
            content = (
                bucket.tensors, bucket.moves, bucket.packs, bucket.sources, bucket.destinations, bucket.overlaps,
            )  # fmt: skip
            text.update(msgpack.encode(content))
        return text.hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __str__(self) -> str:
        moves = list(self.moves)
        remote = [move for move in moves if not move.is_local]
        steps = ", in two steps" if self.num_steps == 2 else ""
        return (
            f"{self.source.kind} -> {self.destination.kind} among ranks {list(self.ranks)}:"
            f" {len(self.buckets)} buckets, {len(moves)} moves, {len(remote)} between ranks{steps},"
            f" {sum(move.num_elements for move in remote)} elements received"
        )
