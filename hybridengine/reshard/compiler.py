"""Compilation of plans: moves (`gather`) grouped into messages and into ordered buckets of bounded size.

The layouts determine the order of everything, so that all ranks compile the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hybridengine.errors import PlanError
from hybridengine.families.family import is_float32
from hybridengine.machine import without_garbage_collection
from hybridengine.reshard.alike import FusedGroup, fused_groups
from hybridengine.reshard.boxes import cover
from hybridengine.reshard.gather import Gather
from hybridengine.reshard.layout import Layout
from hybridengine.reshard.messages import joined, packed
from hybridengine.reshard.plan import Bucket, Move, Pack, Place, Plan
from hybridengine.reshard.transfer import Domain, Transfer
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
        domain = Domain(source, destination, tuple(ranks))
        gather = Gather(source, destination, ranks, nodes, two_step)
        groups = []
        firsts: dict[Hashable, FusedGroup] = {}
        transfers: dict[Hashable, Transfer] = {}
        for fused in fused_groups(domain.shards):
            first = firsts.setdefault(fused.pattern, fused)
            choices = gather.choose(first.tensors)
            if (first.tensors, choices) not in transfers:
                moves = gather.moves(first.tensors, choices)
                packs = packed(moves, source, destination, direct_elements)
                transfers[first.tensors, choices] = Transfer(first, moves, packs, domain)
            groups.append(_Group.of(fused, transfers[first.tensors, choices]))
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


@dataclass
class _Group:
    """Fused tensors that are transferred together. Shapes: R ranks of the domain. Units: elements."""

    parts: list[tuple[FusedGroup, Transfer]]
    in_flight_R: np.ndarray
    """Elements of staging and destination parameters, which are allocated while the group is in flight."""
    held_R: np.ndarray
    """Elements of staging and released source parameters, held in addition to the destination."""
    limit_R: np.ndarray | int = 0
    """Maximum number of elements held in addition to the destination while the group is the last in flight."""

    @classmethod
    def of(cls, fused: FusedGroup, transfer: Transfer) -> _Group:
        return cls([(fused, transfer)], transfer.in_flight_R, transfer.held_R)

    @property
    def is_float32(self) -> bool:
        """True if the tensors are in float32 whatever the type of the model is: such a bucket has no others."""
        return is_float32(self.parts[0][0].tensors[0])

    def fits_with(self, other: _Group, in_flight: int, held_R: np.ndarray | int) -> bool:
        """True if both groups may be in flight within these limits."""
        return bool(
            np.all(self.in_flight_R + other.in_flight_R <= in_flight)
            and np.all(self.held_R + other.held_R <= held_R)
        )

    def add(self, other: _Group) -> None:
        self.parts += other.parts
        self.in_flight_R = self.in_flight_R + other.in_flight_R
        self.held_R = self.held_R + other.held_R
        self.limit_R = other.limit_R


def _in_transfer_order(groups: list[_Group]) -> list[_Group]:
    """Return groups in descending size, so that little is in flight when the destination is nearly complete; senders
    alternate among equal sizes, so that all stages send all the time."""
    turns: Counter[tuple[int, frozenset[int]]] = Counter()
    keys = []
    for index, group in enumerate(groups):
        ((_, transfer),) = group.parts
        keys.append((-transfer.size, turns[transfer.size, transfer.senders], index))
        turns[transfer.size, transfer.senders] += 1
    return [groups[index] for _, _, index in sorted(keys)]


def _buckets(groups: list[_Group], domain: Domain, bucket_elements: int) -> Iterator[Bucket]:
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
        overlaps = before is not None and before.fits_with(part, bucket_elements, part.limit_R)
        yield _bucket(part.parts, domain, overlaps)
        before = part


def _bucket(parts: list[tuple[FusedGroup, Transfer]], domain: Domain, overlaps: bool) -> Bucket:
    """Return the bucket of these groups."""
    moves, packs = list[Move](), list[Pack]()
    sources, destinations = (
        {rank: list[str]() for rank in domain.ranks if rank in layout.keys}
        for layout in (domain.source, domain.destination)
    )
    for group, transfer in parts:
        own = transfer.moves_of(group)
        moves += own
        packs += transfer.packs_of(own)
        for named, found in ((sources, transfer.released(group)), (destinations, transfer.filled(group))):
            for rank, names in found:
                named[rank] += names
    return Bucket(
        tensors=tuple(tensor for group, _ in parts for tensor in group.tensors),
        moves=tuple(moves),
        packs=joined(packs),
        sources={rank: tuple(names) for rank, names in sources.items()},
        destinations={rank: tuple(names) for rank, names in destinations.items()},
        overlaps=overlaps,
    )


def _cut_moves(plan: Plan, bucket: Bucket) -> Iterator[Move]:
    """Yield the moves that restore the source parameters of a bucket from what their ranks hold."""
    for rank, names in bucket.sources.items():
        source, held = plan.source.held(rank), plan.destination.held(rank)
        for name in names:
            for piece in source.by_name[name].pieces:
                for (parameter, other), part in cover(piece.box, held.boxes(piece.tensor))[0]:
                    yield Move(
                        piece.tensor,
                        part,
                        Place(rank, parameter, other.start_in_parameter(part)),
                        Place(rank, name, piece.start_in_parameter(part)),
                    )
