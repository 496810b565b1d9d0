"""A plan: the moves that turn one layout into another, in ordered buckets of bounded size.

A plan is frozen, deterministic and printable: every rank compiles the same plan from the same layouts, and nobody sends
it around. `planner` makes plans; `cost` prices them; `runtime.executor` carries them out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hybridengine.reshard.boxes import Box, extents, num_elements
from hybridengine.reshard.layout import Layout


@dataclass(frozen=True, order=True)
class Place:
    """Where a box starts: in which parameter of which rank, at which index."""

    rank: int
    parameter: str
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """Copy one box of a logical tensor from a place in the source layout to a place in the destination layout."""

    tensor: str
    box: Box
    source: Place
    destination: Place

    @property
    def shape(self) -> tuple[int, ...]:
        return extents(self.box)

    @property
    def num_elements(self) -> int:
        return num_elements(self.box)

    @property
    def is_local(self) -> bool:
        """The element stays on its rank: a copy in memory, nothing on the network."""
        return self.source.rank == self.destination.rank


@dataclass(frozen=True)
class Pack:
    """Boxes of one rank that go, as one message, to each of the same receivers."""

    source_rank: int
    receivers: tuple[int, ...]
    moves: tuple[tuple[Move, ...], ...]
    """For each receiver the moves of the message, in the message's order; their sources are the same for all."""

    @property
    def num_elements(self) -> int:
        return sum(move.num_elements for move in self.moves[0])

    def moves_to(self, receiver: int) -> tuple[Move, ...]:
        return self.moves[self.receivers.index(receiver)]


@dataclass(frozen=True)
class Bucket:
    """Moves that happen together, and the parameters that they fill and use up."""

    tensors: tuple[str, ...]
    """Logical tensors of the bucket; no tensor is in two buckets."""
    moves: tuple[Move, ...]
    sources: dict[int, tuple[str, ...]]
    """Rank -> source parameters that nobody needs any more once the bucket has arrived."""
    destinations: dict[int, tuple[str, ...]]
    """Rank -> destination parameters that the bucket fills completely."""

    @cached_property
    def packs(self) -> tuple[Pack, ...]:
        """Messages of the bucket: a box is packed once, however many ranks receive it.

        A rank that keeps a box in two parameters receives it twice.
        """
        receivers: dict[tuple[str, Box, Place], list[dict[int, Move]]] = {}
        for move in self.moves:
            if not move.is_local:
                copies = receivers.setdefault((move.tensor, move.box, move.source), [{}])
                if all(move.destination.rank in copy for copy in copies):
                    copies.append({})
                next(copy for copy in copies if move.destination.rank not in copy)[move.destination.rank] = (
                    move
                )
        messages: dict[tuple[int, tuple[int, ...]], list[dict[int, Move]]] = {}
        for (_, _, source), copies in receivers.items():
            for moves in copies:
                messages.setdefault((source.rank, tuple(sorted(moves))), []).append(moves)
        return tuple(
            Pack(source, ranks, tuple(tuple(moves[rank] for moves in boxes) for rank in ranks))
            for (source, ranks), boxes in messages.items()
        )

    def sends(self, rank: int) -> list[Pack]:
        """Messages that `rank` sends."""
        return [pack for pack in self.packs if pack.source_rank == rank]

    def receives(self, rank: int) -> list[Pack]:
        """Messages that `rank` receives."""
        return [pack for pack in self.packs if rank in pack.receivers]

    def local(self, rank: int) -> list[Move]:
        """Moves inside `rank`."""
        return [move for move in self.moves if move.is_local and move.source.rank == rank]


@dataclass(frozen=True)
class Plan:
    """All moves from `source` to `destination` among the ranks of one domain."""

    source: Layout
    destination: Layout
    ranks: tuple[int, ...]
    """The domain: no move leaves it."""
    buckets: tuple[Bucket, ...]

    @property
    def moves(self) -> Iterator[Move]:
        return (move for bucket in self.buckets for move in bucket.moves)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of all moves: equal plans, and only they, have equal digests."""
        text = hashlib.sha256()
        for bucket in self.buckets:
            text.update(repr((bucket.tensors, bucket.moves, bucket.sources, bucket.destinations)).encode())
        return text.hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __str__(self) -> str:
        moves = list(self.moves)
        remote = [move for move in moves if not move.is_local]
        return (
            f"{self.source.kind} -> {self.destination.kind} among ranks {list(self.ranks)}:"
            f" {len(self.buckets)} buckets, {len(moves)} moves, {len(remote)} between ranks,"
            f" {sum(move.num_elements for move in remote)} elements received"
        )
