"""Compiles plans: moves (`gather`) grouped into messages and into ordered buckets of bounded size.

The order of everything is fixed by the layouts, so that all ranks compile the same plan.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from hybridengine.errors import PlanError
from hybridengine.reshard.boxes import Box, intersect, subtract
from hybridengine.reshard.components import components
from hybridengine.reshard.gather import Gather
from hybridengine.reshard.layout import Layout, LocalParameter, Shard, ShardKey
from hybridengine.reshard.messages import Packer, joined
from hybridengine.reshard.plan import Bucket, Move, Pack, Place, Plan
from hybridengine.topology.links import NodeMap

BUCKET_ELEMENTS = 64 * 2**20
DIRECT_ELEMENTS = 2**15
"""A box of at least this many elements is a message of its own, sent from and received in place where it is contiguous;
smaller ones share a message, because a message costs more than a copy of so little."""


def compile_plan(
    source: Layout,
    destination: Layout,
    ranks: Sequence[int],
    bucket_elements: int = BUCKET_ELEMENTS,
    nodes: NodeMap | None = None,
    two_step: bool = True,
    direct_elements: int = DIRECT_ELEMENTS,
) -> Plan:
    """Plan that turns `source` into `destination` among `ranks`. The same arguments give the same object again.

    Args:
        bucket_elements: what a rank may need for the buckets in flight, beyond the larger of its two shards: their
            destination parameters and staging. Two buckets are in flight where both fit; a group of fused tensors that
            alone is larger is a bucket of its own.
        nodes: which ranks share a node; None where all do.
        two_step: let a box enter a node once, and pass it on inside the node.
        direct_elements: least size of a box that is sent and received without staging where it is contiguous.

    Raises:
        PlanError: different models, ranks that no layout has, or a box that no rank of the domain holds.
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
    return _compiled(source, destination, tuple(ranks), bucket_elements, nodes, two_step, direct_elements)


@lru_cache(maxsize=2)
def _compiled(
    source: Layout,
    destination: Layout,
    ranks: tuple[int, ...],
    bucket_elements: int,
    nodes: NodeMap | None,
    two_step: bool,
    direct_elements: int,
) -> Plan:
    if source.shape != destination.shape:
        raise PlanError(
            f"layouts {source.kind} and {destination.kind} describe different models; compile a plan for one model"
        )
    with without_garbage_collection():
        domain = _Domain(source, destination, tuple(ranks))
        gather = Gather(source, destination, domain.ranks, nodes, two_step)
        packer = Packer(source, destination, direct_elements)
        groups = []
        for tensors in fused_groups(domain.shards):
            moves = [move for tensor in tensors for move in gather.moves(tensor)]
            groups.append(_group(tensors, moves, packer.packs(moves), domain))
        buckets = _buckets(_in_transfer_order(groups), domain, bucket_elements)
        return Plan(source, destination, domain.ranks, tuple(buckets))


def inverse_local(plan: Plan) -> Plan:
    """The way back: the buckets in reverse, what a rank gave up cut out of its destination shard.

    Nothing moves between ranks: what could not come back so, the plan retains. The small buckets at the end of a plan
    come first, while the destination is nearly complete; so the way back needs no more memory than the way there, and
    its last buckets undo the first ones of the plan.
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
    """Logical tensors that some parameter of some shard holds together, in the order in which shards name them."""
    return components(
        dict.fromkeys((parameter.tensor, *(piece.tensor for piece in parameter.pieces)))
        for shard in shards
        for parameter in shard.parameters
    )


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A plan is many small objects without cycles: looking for cycles among them doubles the time it takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Domain:
    """The ranks of a plan, and their parameters on both sides."""

    def __init__(self, source: Layout, destination: Layout, ranks: tuple[int, ...]) -> None:
        self.source, self.destination, self.ranks = source, destination, ranks
        self._returning: dict[tuple[ShardKey, ShardKey], frozenset[str]] = {}

    @property
    def shards(self) -> list[Shard]:
        """Shards of the domain's ranks, each once."""
        return [
            layout.shards[key]
            for layout in (self.source, self.destination)
            for key in dict.fromkeys(layout.keys[rank] for rank in self.ranks if rank in layout.keys)
        ]

    def filled(self, tensors: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
        """Rank -> destination parameters that come with `tensors`."""
        return {
            rank: tuple(parameter.name for parameter in _of(self.destination.shard(rank), tensors))
            for rank in self.ranks
            if rank in self.destination.keys
        }

    def num_filled(self, rank: int, tensors: tuple[str, ...]) -> int:
        """Elements of the destination parameters that come with `tensors`."""
        if rank not in self.destination.keys:
            return 0
        return sum(parameter.num_elements for parameter in _of(self.destination.shard(rank), tensors))

    def num_released(self, rank: int, tensors: tuple[str, ...]) -> int:
        """Elements of the source parameters that are given up with `tensors`."""
        if rank not in self.source.keys:
            return 0
        by_name = self.source.shard(rank).by_name
        return sum(by_name[name].num_elements for name in self.released_by(rank, tensors))

    def released(self, tensors: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
        """Rank -> source parameters of `tensors` that the rank finds complete in its destination shard.

        A rank without a destination shard serves others: it gives nothing up.
        """
        return {rank: self.released_by(rank, tensors) for rank in self.ranks if rank in self.source.keys}

    def released_by(self, rank: int, tensors: tuple[str, ...]) -> tuple[str, ...]:
        """Source parameters of `tensors` that one rank gives up."""
        if rank not in self.destination.keys:
            return ()
        keys = self.source.keys[rank], self.destination.keys[rank]
        if keys not in self._returning:
            destination = self.destination.shards[keys[1]]
            self._returning[keys] = frozenset(
                parameter.name
                for parameter in self.source.shards[keys[0]].parameters
                if not _missing(parameter, destination)
            )
        names = (parameter.name for parameter in _of(self.source.shard(rank), tensors))
        return tuple(name for name in names if name in self._returning[keys])


def _of(shard: Shard, tensors: tuple[str, ...]) -> list[LocalParameter]:
    return [parameter for tensor in tensors for parameter in shard.by_tensor.get(tensor, ())]


def _missing(parameter: LocalParameter, shard: Shard) -> list[tuple[str, Box]]:
    """Boxes of `parameter` that `shard` does not hold: (logical tensor, box)."""
    missing = []
    for piece in parameter.pieces:
        rest = [piece.box]
        for _, other in shard.pieces.get(piece.tensor, ()):
            rest = [part for box in rest for part in subtract(box, other.box)]
        missing += [(piece.tensor, box) for box in rest]
    return missing


@dataclass(frozen=True)
class _Group:
    """Fused tensors with their moves and messages."""

    tensors: tuple[str, ...]
    moves: list[Move]
    packs: list[Pack]
    filled: list[int]
    """For each rank of the domain: elements of the destination parameters."""
    held: list[int]
    """For each rank: elements that are held besides while the group is in flight, its staging and its source."""
    in_flight: list[int]
    """For each rank: elements that appear while the group is in flight, its staging and its destination."""


def _group(tensors: tuple[str, ...], moves: list[Move], packs: list[Pack], domain: _Domain) -> _Group:
    staging = Bucket(tensors, (), tuple(packs), {}, {}).staging
    staged = [staging.get(rank, 0) for rank in domain.ranks]
    filled = [domain.num_filled(rank, tensors) for rank in domain.ranks]
    released = [domain.num_released(rank, tensors) for rank in domain.ranks]
    return _Group(tensors, moves, packs, filled, _sum(staged, released), _sum(staged, filled))


def _in_transfer_order(groups: list[_Group]) -> list[_Group]:
    """Large groups first: little is then in flight when the destination is nearly complete, and the peak is lowest.

    Among groups of one size the senders take turns, so that all stages send all the time.
    """
    turns: Counter[tuple[int, frozenset[int]]] = Counter()
    keys = []
    for index, group in enumerate(groups):
        size, senders = (
            max(group.in_flight),
            frozenset(pack.source_rank for pack in group.packs if pack.step == 0),
        )
        keys.append((-size, turns[size, senders], index))
        turns[size, senders] += 1
    return [groups[index] for _, _, index in sorted(keys)]


def _buckets(groups: list[_Group], domain: _Domain, bucket_elements: int) -> Iterator[Bucket]:
    """Groups in order, cut so that two buckets fit into `bucket_elements` on every rank.

    Towards the end buckets become small: what they hold besides the destination then comes on top of a destination that
    is nearly complete. Before, the destination parameters that are still to come leave room for it.
    """
    limits = _limits(groups, domain, bucket_elements)
    zeros = [0] * len(domain.ranks)
    current: list[_Group] = []
    in_flight, held, previous = zeros, zeros, None
    for index, group in enumerate(groups):
        more_in_flight, more_held = _sum(in_flight, group.in_flight), _sum(held, group.held)
        if current and not (
            _fits(more_in_flight, [bucket_elements // 2] * len(zeros))
            and _fits(more_held, [limit // 2 for limit in limits[index]])
        ):
            yield _bucket(
                current, domain, _overlaps(previous, (in_flight, held), bucket_elements, limits[index - 1])
            )
            current, previous = [], (in_flight, held)
            more_in_flight, more_held = group.in_flight, group.held
        current.append(group)
        in_flight, held = more_in_flight, more_held
    if current:
        yield _bucket(current, domain, _overlaps(previous, (in_flight, held), bucket_elements, limits[-1]))


def _limits(groups: list[_Group], domain: _Domain, bucket_elements: int) -> list[list[int]]:
    """For each group and rank: what may be held besides the destination while the group is the last in flight."""
    room = [bucket_elements // 32] * len(domain.ranks)
    limits = []
    for group in reversed(groups):
        limits.append([min(bucket_elements, elements) for elements in room])
        sources = [
            held - (appears - filled)
            for held, appears, filled in zip(group.held, group.in_flight, group.filled, strict=True)
        ]
        room = [
            elements + max(0, filled - source)
            for elements, filled, source in zip(room, group.filled, sources, strict=True)
        ]
    return limits[::-1]


def _overlaps(
    previous: tuple[list[int], list[int]] | None,
    present: tuple[list[int], list[int]],
    bucket_elements: int,
    limit: list[int],
) -> bool:
    """Whether a bucket may be in flight together with the one before it."""
    if previous is None:
        return False
    return _fits(_sum(previous[0], present[0]), [bucket_elements] * len(limit)) and _fits(
        _sum(previous[1], present[1]), limit
    )


def _sum(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _fits(elements: list[int], limits: list[int]) -> bool:
    return all(a <= b for a, b in zip(elements, limits, strict=True))


def _bucket(groups: list[_Group], domain: _Domain, overlaps: bool) -> Bucket:
    tensors = tuple(tensor for group in groups for tensor in group.tensors)
    return Bucket(
        tensors=tensors,
        moves=tuple(move for group in groups for move in group.moves),
        packs=joined([pack for group in groups for pack in group.packs]),
        sources=domain.released(tensors),
        destinations=domain.filled(tensors),
        overlaps=overlaps,
    )


def _cut_moves(plan: Plan, bucket: Bucket) -> Iterator[Move]:
    """Moves that cut the source parameters of a bucket out of what their ranks hold."""
    for rank, names in bucket.sources.items():
        if not names:
            continue
        source, destination = plan.source.shard(rank), plan.destination.shard(rank)
        for name in names:
            for piece in source.by_name[name].pieces:
                missing = [piece.box]
                for parameter, other in destination.pieces.get(piece.tensor, ()):
                    parts = [part for box in missing if (part := intersect(box, other.box))]
                    for part in parts:
                        held, target = other.start_in_parameter(part), piece.start_in_parameter(part)
                        yield Move(
                            piece.tensor, part, Place(rank, parameter, held), Place(rank, name, target)
                        )
                    missing = [rest for box in missing for rest in subtract(box, other.box)]
