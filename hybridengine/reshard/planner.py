"""Compiles plans: for every box that a rank needs, the nearest rank that holds it.

A box that the rank holds itself is never fetched. Any other box comes from an owner inside the domain: the one that
already sends it to somebody (a message is packed once for all its receivers), else the one that has sent least so far.
The order of everything is fixed by the layouts, so that all ranks compile the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridengine.errors import PlanError
from hybridengine.reshard.boxes import Box, intersect, moved, num_elements, starts, subtract
from hybridengine.reshard.layout import Layout, Piece, ShardKey
from hybridengine.reshard.plan import Bucket, Move, Place, Plan


def compile_plan(
    source: Layout,
    destination: Layout,
    ranks: Sequence[int],
    bucket_elements: int = 64 * 2**20,
) -> Plan:
    """Plan that turns `source` into `destination` among `ranks`.

    A bucket closes before its destination parameters exceed `bucket_elements` on any rank; a single group of fused
    tensors that is larger is a bucket of its own.

    Raises:
        PlanError: different models, or a box that no rank of the domain holds.
    """
    if source.shape != destination.shape:
        raise PlanError(
            f"layouts {source.kind} and {destination.kind} describe different models; compile a plan for one model"
        )
    ranks = tuple(ranks)
    owners = _Owners(source, ranks)
    moves_of: dict[str, list[Move]] = {}
    for rank in ranks:
        if rank not in destination.keys:
            continue
        for parameter in destination.shard(rank).parameters:
            for piece in parameter.pieces:
                for move in owners.fetch(rank, parameter.name, piece):
                    moves_of.setdefault(piece.tensor, []).append(move)
    buckets = [
        _bucket(tensors, moves_of, source, destination, ranks)
        for tensors in _cut_into_buckets(source, destination, ranks, bucket_elements)
    ]
    return Plan(source, destination, ranks, tuple(buckets))


def check_local_return(plan: Plan) -> None:
    """Check that every rank's source shard is part of its destination shard, so that the way back needs no network.

    Raises:
        PlanError: some rank would have to fetch elements to return.
    """
    for rank in plan.ranks:
        held = plan.destination.shard(rank).pieces_of()
        for parameter in plan.source.shard(rank).parameters:
            for piece in parameter.pieces:
                rest = [piece.box]
                for _, other in held.get(piece.tensor, ()):
                    rest = [part for box in rest for part in subtract(box, other.box)]
                if rest:
                    raise PlanError(
                        f"{parameter.name} of rank {rank} in {plan.source.kind} holds {piece.tensor}{list(rest[0])},"
                        f" which {plan.destination.kind} does not give that rank; the layouts must nest"
                        " (interval grouping, p_g | p and t_g | t)"
                    )


def inverse_local(plan: Plan) -> Plan:
    """The way back: the same buckets, every source parameter cut out of its own rank's destination shard.

    Raises:
        PlanError: the layouts do not nest.
    """
    check_local_return(plan)
    back = compile_plan(plan.destination, plan.source, plan.ranks)
    moves_of: dict[str, list[Move]] = {}
    for move in back.moves:
        moves_of.setdefault(move.tensor, []).append(move)
    buckets = tuple(
        Bucket(
            bucket.tensors,
            tuple(move for tensor in bucket.tensors for move in moves_of.get(tensor, ())),
            sources=bucket.destinations,
            destinations=bucket.sources,
        )
        for bucket in plan.buckets
    )
    return Plan(plan.destination, plan.source, plan.ranks, buckets)


@dataclass(frozen=True)
class _Owner:
    rank: int
    parameter: str
    piece: Piece


class _Owners:
    """Who holds which box of which logical tensor, and how much each rank has been asked to send."""

    def __init__(self, layout: Layout, ranks: Iterable[int]) -> None:
        self._layout = layout
        self._owners: dict[str, list[_Owner]] = {}
        self._sent: dict[int, int] = {}
        self._senders: dict[tuple[str, Box], int] = {}
        for rank in ranks:
            if rank not in layout.keys:
                continue
            self._sent[rank] = 0
            for tensor, pieces in layout.shard(rank).pieces_of().items():
                self._owners.setdefault(tensor, []).extend(
                    _Owner(rank, name, piece) for name, piece in pieces
                )

    def fetch(self, rank: int, parameter: str, piece: Piece) -> list[Move]:
        """Moves that fill one piece of one parameter of `rank`."""
        moves: list[Move] = []
        missing = [piece.box]
        owners = self._owners.get(piece.tensor, [])
        while missing:
            box = missing.pop()
            candidates = [(owner, part) for owner in owners if (part := intersect(owner.piece.box, box))]
            if not candidates:
                raise PlanError(
                    f"{piece.tensor}{list(box)}, which rank {rank} needs for {parameter}, is held by no rank of"
                    f" {self._layout.kind} in the domain; the domain must hold a whole model"
                )
            owner, part = min(candidates, key=lambda found: self._preference(rank, piece.tensor, *found))
            if owner.rank != rank:
                self._senders.setdefault((piece.tensor, part), owner.rank)
                self._sent[owner.rank] += num_elements(part)
            moves.append(self._move(part, owner, rank, parameter, piece))
            missing += subtract(box, part)
        return moves

    def _preference(
        self, rank: int, tensor: str, owner: _Owner, part: Box
    ) -> tuple[bool, int, bool, int, int]:
        sends_it = self._senders.get((tensor, part)) == owner.rank
        return owner.rank != rank, -num_elements(part), not sends_it, self._sent[owner.rank], owner.rank

    @staticmethod
    def _move(part: Box, owner: _Owner, rank: int, parameter: str, piece: Piece) -> Move:
        source = moved(part, starts(owner.piece.box), owner.piece.offset)
        target = moved(part, starts(piece.box), piece.offset)
        return Move(
            piece.tensor,
            part,
            Place(owner.rank, owner.parameter, starts(source)),
            Place(rank, parameter, starts(target)),
        )


def _cut_into_buckets(
    source: Layout, destination: Layout, ranks: tuple[int, ...], bucket_elements: int
) -> list[tuple[str, ...]]:
    """Logical tensors in model order, cut where a bucket is full; fused tensors stay together."""
    buckets: list[tuple[str, ...]] = []
    current: tuple[str, ...] = ()
    size: dict[ShardKey, int] = {}
    keys = sorted({destination.keys[rank] for rank in ranks if rank in destination.keys})
    for tensors in fused_groups(source, destination):
        added = {
            key: sum(
                parameter.num_elements
                for parameter in destination.shards[key].parameters
                if parameter.tensor in tensors
            )
            for key in keys
        }
        total = {key: size.get(key, 0) + added[key] for key in keys}
        if current and max(total.values(), default=0) > bucket_elements:
            buckets.append(current)
            current, total = (), added
        current, size = current + tensors, total
    return [*buckets, current] if current else buckets


def fused_groups(*layouts: Layout) -> list[tuple[str, ...]]:
    """Logical tensors that some parameter of some layout holds together, in model order."""
    leader = {tensor: tensor for tensor in layouts[0].shape.tensors}

    def find(tensor: str) -> str:
        while leader[tensor] != tensor:
            tensor = leader[tensor]
        return tensor

    for layout in layouts:
        for shard in layout.shards.values():
            for parameter in shard.parameters:
                for piece in parameter.pieces[1:]:
                    leader[find(piece.tensor)] = find(parameter.pieces[0].tensor)
    groups: dict[str, list[str]] = {}
    for tensor in leader:
        groups.setdefault(find(tensor), []).append(tensor)
    return [tuple(group) for group in groups.values()]


def _bucket(
    tensors: tuple[str, ...],
    moves_of: dict[str, list[Move]],
    source: Layout,
    destination: Layout,
    ranks: tuple[int, ...],
) -> Bucket:
    def held(layout: Layout) -> dict[int, tuple[str, ...]]:
        return {
            rank: tuple(
                parameter.name for parameter in layout.shard(rank).parameters if parameter.tensor in tensors
            )
            for rank in ranks
            if rank in layout.keys
        }

    moves = tuple(move for tensor in tensors for move in moves_of.get(tensor, ()))
    return Bucket(tensors, moves, held(source), held(destination))
