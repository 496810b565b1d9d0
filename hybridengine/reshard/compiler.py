"""Compilation of plans: moves (`gather`) grouped into messages and into ordered buckets of bounded size.

The layouts determine the order of everything, so that all ranks compile the same plan.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hybridengine.errors import PlanError
from hybridengine.families.family import is_float32
from hybridengine.reshard.boxes import Box, cover
from hybridengine.reshard.domains import components
from hybridengine.reshard.gather import Gather
from hybridengine.reshard.layout import Layout, LocalParameter, Piece, Shard, ShardKey
from hybridengine.reshard.messages import joined, packed
from hybridengine.reshard.plan import Bucket, Move, Pack, Place, Plan
from hybridengine.topology.links import NodeMap

BUCKET_ELEMENTS = 64 * 2**20
DIRECT_ELEMENTS = 2**15
"""Minimum size of a box that is a message of its own, sent and received in place where it is contiguous; smaller boxes
share a message, because a message costs more than copying so little."""


@lru_cache(maxsize=2)
def compile_plan(
    source: Layout,
    destination: Layout,
    ranks: tuple[int, ...],
    bucket_elements: int = BUCKET_ELEMENTS,
    nodes: NodeMap | None = None,
    two_step: bool = True,
    direct_elements: int = DIRECT_ELEMENTS,
) -> Plan:
    """Return the plan that turns `source` into `destination` among `ranks`; cached, with equal plans on all ranks.

    Args:
        bucket_elements: limit per rank for the destination parameters and staging of the buckets in flight, in addition
            to the larger of its two shards. Two buckets are in flight where both fit; a larger group of fused tensors is
            a bucket of its own.
        nodes: assignment of ranks to nodes; None if all share one.
        two_step: send a box to a node once, and forward it within the node.

    Raises:
        PlanError: layouts of different models, ranks that neither layout has, or a box that no rank of the domain holds.
    """
    unknown = sorted(set(ranks) - {*source.keys, *destination.keys})
    if unknown or not ranks:
        raise PlanError(
            f"ranks={list(ranks)} must be ranks of {source.kind} or {destination.kind}, at least one of them; take a"
            " group of domains(source, destination)"
        )
    if bucket_elements < 1:
        raise PlanError(
            f"bucket_elements={bucket_elements} must be at least 1; choose about {BUCKET_ELEMENTS}"
        )
    if source.shape != destination.shape:
        raise PlanError(
            f"layouts {source.kind} and {destination.kind} describe different models; compile a plan for one model"
        )
    with without_garbage_collection():
        domain = _Domain(source, destination, tuple(ranks))
        gather = Gather(source, destination, ranks, nodes, two_step)
        groups = []
        for tensors in fused_groups(domain.shards):
            moves = [move for tensor in tensors for move in gather.moves(tensor)]
            packs = packed(moves, source, destination, direct_elements)
            groups.append(_Group.of(tensors, moves, packs, domain))
        buckets = _buckets(_in_transfer_order(groups), domain, bucket_elements)
        return Plan(source, destination, domain.ranks, tuple(buckets))


def inverse_local(plan: Plan) -> Plan:
    """Return the inverse plan: buckets in reverse, with each rank's released parameters cut out of its destination shard.

    Nothing moves between ranks, because the plan retains what could not be restored locally. In this order the inverse
    needs no more memory than the plan, and its last buckets undo the plan's first ones.
    """
    with without_garbage_collection():
        buckets = tuple(
            Bucket(
                bucket.tensors,
                tuple(_cut_moves(plan, bucket)),
                packs=(),
                sources=bucket.destinations,
                destinations=bucket.sources,
            )
            for bucket in reversed(plan.buckets)
        )
        return Plan(plan.destination, plan.source, plan.ranks, buckets)


def fused_groups(shards: Iterable[Shard]) -> list[tuple[str, ...]]:
    """Return the logical tensors that parameters of the shards hold together, in the order of the shards."""
    return components(
        dict.fromkeys((parameter.tensor, *(piece.tensor for piece in parameter.pieces)))
        for shard in shards
        for parameter in shard.parameters
    )


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Suspend the garbage collector, which doubles the time of planning: plans are many small objects without cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Domain:
    """Ranks of a plan, and their parameters in both layouts."""

    def __init__(self, source: Layout, destination: Layout, ranks: tuple[int, ...]) -> None:
        self.source, self.destination, self.ranks = source, destination, ranks
        self._returning: dict[tuple[ShardKey, ShardKey], frozenset[str]] = {}
        self._counts: dict[tuple[ShardKey | None, ShardKey | None], tuple[Counter[str], Counter[str]]] = {}
        places = [(source.keys.get(rank), destination.keys.get(rank)) for rank in ranks]
        for rank, place in zip(ranks, places, strict=True):
            if place not in self._counts:
                self._counts[place] = self._counted(rank)
        numbers = {place: number for number, place in enumerate(self._counts)}
        self._place_R = np.array([numbers[place] for place in places])

    @property
    def shards(self) -> list[Shard]:
        return [
            layout.shards[key]
            for layout in (self.source, self.destination)
            for key in dict.fromkeys(layout.keys[rank] for rank in self.ranks if rank in layout.keys)
        ]

    def _counted(self, rank: int) -> tuple[Counter[str], Counter[str]]:
        """Return the elements that a rank fills and releases, by tensor of the parameter."""
        filled, released = Counter[str](), Counter[str]()
        for parameter in self.destination.held(rank).parameters:
            filled[parameter.tensor] += parameter.num_elements
        for parameter in self.released(rank, tuple(self.source.held(rank).by_tensor)):
            released[parameter.tensor] += parameter.num_elements
        return filled, released

    def elements(self, tensors: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the elements that each rank fills and releases with `tensors`."""
        sums = [
            [sum([counts.get(tensor, 0) for tensor in tensors]) for counts in both]
            for both in self._counts.values()
        ]
        filled_R, released_R = np.array(sums)[self._place_R].T
        return filled_R, released_R

    def filled(self, rank: int, tensors: tuple[str, ...]) -> list[LocalParameter]:
        return _of(self.destination.held(rank), tensors)

    def released(self, rank: int, tensors: tuple[str, ...]) -> list[LocalParameter]:
        """Return the source parameters of `tensors` that a rank's destination shard contains completely."""
        source, destination = self.source.keys.get(rank), self.destination.keys.get(rank)
        if source is None or destination is None:
            return []
        if (source, destination) not in self._returning:
            held = self.destination.shards[destination].pieces
            self._returning[source, destination] = frozenset(
                parameter.name
                for parameter in self.source.shards[source].parameters
                if not any(cover(piece.box, _boxes(held, piece.tensor))[1] for piece in parameter.pieces)
            )
        returning = self._returning[source, destination]
        return [one for one in _of(self.source.shards[source], tensors) if one.name in returning]


def _of(shard: Shard, tensors: tuple[str, ...]) -> list[LocalParameter]:
    return [parameter for tensor in tensors for parameter in shard.by_tensor.get(tensor, ())]


def _boxes(held: dict[str, list[tuple[str, Piece]]], tensor: str) -> list[tuple[tuple[str, Piece], Box]]:
    return [(where, where[1].box) for where in held.get(tensor, ())]


@dataclass
class _Group:
    """Fused tensors with their moves and messages. Shapes: R ranks of the domain. Units: elements."""

    tensors: tuple[str, ...]
    moves: list[Move]
    packs: list[Pack]
    in_flight_R: np.ndarray
    """Elements of staging and destination parameters, which are allocated while the group is in flight."""
    held_R: np.ndarray
    """Elements of staging and released source parameters, held in addition to the destination."""
    limit_R: np.ndarray | int = 0
    """Maximum number of elements held in addition to the destination while the group is the last in flight."""

    @classmethod
    def of(cls, tensors: tuple[str, ...], moves: list[Move], packs: list[Pack], domain: _Domain) -> _Group:
        staging = Bucket(tensors, (), tuple(packs), {}, {}).staging
        staged_R = np.array([staging.get(rank, 0) for rank in domain.ranks])
        filled_R, released_R = domain.elements(tensors)
        return cls(tensors, moves, packs, staged_R + filled_R, staged_R + released_R)

    @property
    def is_float32(self) -> bool:
        """True if the tensors are in float32 whatever the type of the model is: such a bucket has no others."""
        return is_float32(self.tensors[0])

    def fits_with(self, other: _Group, in_flight: int, held_R: np.ndarray | int) -> bool:
        """True if both groups may be in flight within these limits."""
        return bool(
            np.all(self.in_flight_R + other.in_flight_R <= in_flight)
            and np.all(self.held_R + other.held_R <= held_R)
        )

    def add(self, other: _Group) -> None:
        self.tensors += other.tensors
        self.moves += other.moves
        self.packs += other.packs
        self.in_flight_R = self.in_flight_R + other.in_flight_R
        self.held_R = self.held_R + other.held_R
        self.limit_R = other.limit_R


def _in_transfer_order(groups: list[_Group]) -> list[_Group]:
    """Return groups in descending size, so that little is in flight when the destination is nearly complete; senders
    alternate among equal sizes, so that all stages send all the time."""
    turns: Counter[tuple[int, frozenset[int]]] = Counter()
    keys = []
    for index, group in enumerate(groups):
        size = int(group.in_flight_R.max())
        senders = frozenset(pack.source_rank for pack in group.packs if pack.step == 0)
        keys.append((-size, turns[size, senders], index))
        turns[size, senders] += 1
    return [groups[index] for _, _, index in sorted(keys)]


def _buckets(groups: list[_Group], domain: _Domain, bucket_elements: int) -> Iterator[Bucket]:
    """Yield groups in order as buckets, cut so that two fit into `bucket_elements` on every rank. They become smaller
    towards the end, because they may use only the destination's space that is still to be filled."""
    room_R = np.full(len(domain.ranks), bucket_elements // 32)
    for group in reversed(groups):
        group.limit_R = np.minimum(bucket_elements, room_R)
        room_R = room_R + np.maximum(0, group.in_flight_R - group.held_R)
    parts: list[_Group] = []
    for group in groups:
        last = parts[-1] if parts else None
        if (
            last
            and last.is_float32 == group.is_float32
            and last.fits_with(group, bucket_elements // 2, group.limit_R // 2)
        ):
            last.add(group)
        else:
            parts.append(group)
    before = None
    for part in parts:
        yield Bucket(
            tensors=part.tensors,
            moves=tuple(part.moves),
            packs=joined(part.packs),
            sources={
                rank: tuple(parameter.name for parameter in domain.released(rank, part.tensors))
                for rank in domain.ranks
                if rank in domain.source.keys
            },
            destinations={
                rank: tuple(parameter.name for parameter in domain.filled(rank, part.tensors))
                for rank in domain.ranks
                if rank in domain.destination.keys
            },
            overlaps=before is not None and before.fits_with(part, bucket_elements, part.limit_R),
        )
        before = part


def _cut_moves(plan: Plan, bucket: Bucket) -> Iterator[Move]:
    """Yield the moves that restore the source parameters of a bucket from what their ranks hold."""
    for rank, names in bucket.sources.items():
        source, held = plan.source.held(rank), plan.destination.held(rank).pieces
        for name in names:
            for piece in source.by_name[name].pieces:
                for (parameter, other), part in cover(piece.box, _boxes(held, piece.tensor))[0]:
                    yield Move(
                        piece.tensor,
                        part,
                        Place(rank, parameter, other.start_in_parameter(part)),
                        Place(rank, name, piece.start_in_parameter(part)),
                    )
