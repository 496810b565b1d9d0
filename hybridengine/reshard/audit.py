"""Verifies a plan from its two layouts alone, without the planner's code: every destination element is written exactly
once, from memory that holds it at that time, by messages on which sender and receivers agree, and nothing is lost.

The audit counts boxes and volumes, never single elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise

from hybridengine.reshard.boxes import Box, extents, full_box, intersect, moved, num_elements, starts
from hybridengine.reshard.layout import Layout, LocalParameter, Piece, Shard, ShardKey
from hybridengine.reshard.plan import Bucket, Move, Pack, Place, Plan

BucketOf = dict[tuple[int, str], int]
"""(rank, parameter) -> index of the bucket that fills or releases it."""


def audit(plan: Plan) -> list[str]:
    """Return the problems of a plan from one layout to another.

    Guarantees: if there are none, every rank of the domain ends with its complete and exact destination shard, no source
    is read after its release, and a rank releases what its destination shard holds and keeps the rest.
    """
    problems = list(_layout_problems(plan))
    if problems:
        return problems
    filled, given_up, problems = _ownership(plan)
    for rank in plan.ranks:
        for parameter in plan.destination.held(rank).parameters:
            if (rank, parameter.name) not in filled:
                problems.append(f"no bucket fills {_at(rank, parameter.name)}")
    problems += _move_problems(plan, filled, given_up)
    for index, bucket in enumerate(plan.buckets):
        problems += [f"bucket {index}: {problem}" for problem in _message_problems(plan, bucket)]
    return [*problems, *_release_problems(plan, given_up)]


def audit_return(plan: Plan, back: Plan) -> list[str]:
    """Return the problems of `back` as the local inverse of `plan`.

    Guarantees: if there are none, `back` restores, bucket by bucket from the last to the first, exactly the sources that
    `plan` releases, and nothing moves between ranks.
    """
    if (back.source, back.destination, back.ranks) != (plan.destination, plan.source, plan.ranks):
        return ["the way back is between other layouts or ranks"]
    if len(back.buckets) != len(plan.buckets):
        return [f"{len(plan.buckets)} buckets there, {len(back.buckets)} back"]
    filled, given_up, problems = _ownership(back)
    for index, (there, here) in enumerate(zip(reversed(plan.buckets), back.buckets, strict=True)):
        if _named(here.destinations) != _named(there.sources):
            problems.append(f"bucket {index} does not restore what was given up there")
        if _named(here.sources) != _named(there.destinations):
            problems.append(f"bucket {index} does not give up what was filled there")
        if here.packs or any(not move.is_local for move in here.moves):
            problems.append(f"bucket {index} moves something between ranks")
    return [*problems, *_move_problems(back, filled, given_up)]


def union_elements(boxes: Iterable[Box], dim: int = 0) -> int:
    """Return the number of elements in at least one of `boxes`, counted along the dimensions from `dim` on."""
    ordered = sorted(boxes, key=lambda box: box[dim:])
    if len(ordered) < 2 or dim == len(ordered[0]):
        return sum(num_elements(box[dim:]) for box in ordered[:1])
    total, last = 0, len(ordered)
    first = 0
    while first < last:
        # a chain of boxes that overlap along `dim`; no other box overlaps any of them
        stop, end = first + 1, ordered[first][dim][1]
        while stop < last and ordered[stop][dim][0] < end:
            end = max(end, ordered[stop][dim][1])
            stop += 1
        chain = ordered[first:stop]
        edges = sorted({edge for box in chain for edge in box[dim]})
        for low, high in pairwise(edges):
            inside = [box for box in chain if box[dim][0] <= low and high <= box[dim][1]]
            total += (high - low) * union_elements(inside, dim + 1)
        first = stop
    return total


def _layout_problems(plan: Plan) -> Iterator[str]:
    """Yield the problems of the layouts themselves; moves between invalid layouts cannot be audited."""
    if plan.source.shape != plan.destination.shape:
        yield f"{plan.source.kind} and {plan.destination.kind} describe different models"
        return
    for layout in (plan.source, plan.destination):
        for key in dict.fromkeys(layout.keys[rank] for rank in plan.ranks if rank in layout.keys):
            yield from _shard_problems(layout, key)


@lru_cache(maxsize=256)
def _shard_problems(layout: Layout, key: ShardKey) -> tuple[str, ...]:
    """Return pieces that overlap or exceed their parameter or tensor; cached, as domains share shards."""
    problems = []
    tensors = layout.shape.tensors
    for parameter in layout.shards[key].parameters:
        faults = [
            *_overlaps(parameter.shape, tuple([(piece.box, piece.offset) for piece in parameter.pieces]))
        ]
        for piece in parameter.pieces:
            if not _is_inside(piece.box, full_box(tensors.get(piece.tensor, ()))):
                faults.append(f"a piece that leaves {piece.tensor}")
        problems += [f"{parameter.name} of shard {key} in {layout.kind} has {fault}" for fault in faults]
    return tuple(problems)


@lru_cache(maxsize=4096)
def _overlaps(shape: tuple[int, ...], pieces: tuple[tuple[Box, tuple[int, ...]], ...]) -> tuple[str, ...]:
    """Return what is wrong with (box, offset) of the pieces of a parameter; cached, as layers and experts are alike."""
    local = [moved(box, starts(box), offset) for box, offset in pieces]
    if not all(_is_inside(box, full_box(shape)) for box in local):
        return ("a piece that leaves the parameter",)
    return ("pieces that overlap",) if union_elements(local) < sum(map(num_elements, local)) else ()


def _ownership(plan: Plan) -> tuple[BucketOf, BucketOf, list[str]]:
    """Return (filled parameters by bucket, released parameters by bucket, problems of these tables)."""
    problems: list[str] = []
    bucket_of: dict[str, int] = {}
    filled: BucketOf = {}
    given_up: BucketOf = {}
    ranks = set(plan.ranks)
    for index, bucket in enumerate(plan.buckets):
        tensors = set(bucket.tensors)
        for tensor in bucket.tensors:
            if tensor in bucket_of:
                problems.append(f"{tensor} is in bucket {bucket_of[tensor]} and in bucket {index}")
            bucket_of[tensor] = index
        for layout, named, found, verb in (
            (plan.destination, bucket.destinations, filled, "fills"),
            (plan.source, bucket.sources, given_up, "gives up"),
        ):
            for rank, names in named.items():
                held = layout.held(rank).by_name if rank in ranks else {}
                for name in names:
                    parameter = held.get(name)
                    faults = []
                    if parameter is None:
                        faults.append("which the domain does not have")
                    elif not tensors.issuperset(parameter.tensors):
                        faults.append("which holds tensors of other buckets")
                    if (rank, name) in found:
                        faults.append(f"and so does bucket {found[rank, name]}")
                    found[rank, name] = index
                    problems += [f"bucket {index} {verb} {_at(rank, name)}, {fault}" for fault in faults]
    return filled, given_up, problems


def _move_problems(plan: Plan, filled: BucketOf, given_up: BucketOf) -> Iterator[str]:
    """Yield moves that read data that is not present, and filled parameters that are not written exactly once."""
    domain = set(plan.ranks)
    written: dict[tuple[int, str, tuple[int, ...]], list[Box]] = {}
    """(rank, parameter, offset of a piece) -> boxes of the piece's tensor that moves write to it."""
    for index, bucket in enumerate(plan.buckets):
        tensors, arrived = set(bucket.tensors), set[tuple[str, Box, Place]]()
        if any(move.step for move in bucket.moves):
            arrived = {(move.tensor, move.box, move.destination) for move in bucket.moves if not move.step}
        for move in bucket.moves:
            faults = list(_read_faults(plan, move, given_up.get(move.source[:2], index), index, arrived))
            rank, name, _ = move.destination
            piece = _piece_at(plan.destination, move.destination, move)
            if piece is None:
                faults.append("writes what does not belong there")
            else:
                if filled.get((rank, name)) != index:
                    faults.append("writes into a parameter that this bucket does not fill")
                written.setdefault((rank, name, piece.offset), []).append(move.box)
            if move.tensor not in tensors:
                faults.append("is of a tensor of no bucket, or of another")
            if move.source.rank not in domain or rank not in domain:
                faults.append("leaves the domain")
            yield from (f"bucket {index}: {_show(move)} {fault}" for fault in faults)
    for rank, name in filled:
        parameter = _parameter(plan.destination, rank, name)
        for piece in parameter.pieces if parameter else ():
            boxes = written.get((rank, name, piece.offset), [])
            if len(boxes) == 1 and boxes[0] == piece.box:
                continue
            total, distinct = sum(map(num_elements, boxes)), union_elements(boxes)
            missing = num_elements(piece.box) - distinct
            where = f"{piece.tensor}{list(piece.box)} in {_at(rank, name)}"
            if missing:
                yield f"{missing} elements of {where} are not written"
            if total > distinct:
                yield f"{total - distinct} elements of {where} are written again"


def _read_faults(
    plan: Plan, move: Move, gone: int, index: int, arrived: set[tuple[str, Box, Place]]
) -> Iterator[str]:
    """Yield faults of what a move of bucket `index` reads; bucket `gone` has released its source."""
    if not move.step:
        if _piece_at(plan.source, move.source, move) is None:
            yield "reads what is not there"
        if gone < index:
            yield f"reads what bucket {gone} has given up"
        return
    if move.step != 1:
        yield f"is of step {move.step}; there are 0 and 1"
    if move.is_local:
        yield "is a local copy of step 1; local copies are made before anything arrives"
    if (move.tensor, move.box, move.source) not in arrived:
        yield "passes on what no move of step 0 has brought"


def _message_problems(plan: Plan, bucket: Bucket) -> Iterator[str]:
    """Yield moves between ranks that are not in exactly one message, or that sender and receivers read differently."""
    carried: Counter[Move] = Counter()
    for pack in bucket.packs:
        where = f"message of step {pack.step}, rank {pack.source_rank} to ranks {list(pack.receivers)},"
        if not 0 < len(pack.receivers) == len(pack.moves) == len(pack.received_in_place):
            yield f"{where} has {len(pack.moves)} lists of moves and {len(pack.received_in_place)} flags"
            continue
        if len({pack.source_rank, *pack.receivers}) <= len(pack.receivers):
            yield f"{where} goes to a rank twice, or to its sender"
        for receiver, moves in zip(pack.receivers, pack.moves, strict=True):
            carried.update(moves)
            yield from (f"{where} {fault}" for fault in _list_faults(pack, receiver, moves))
        yield from (f"{where} {fault}" for fault in _in_place_faults(plan, pack))
    remote = Counter(move for move in bucket.moves if not move.is_local)
    if remote == carried:
        return
    for move in remote - carried:
        yield f"{_show(move)} is in no message"
    for move in carried - remote:
        yield f"{_show(move)} is in a message, and no move of the bucket"


def _list_faults(pack: Pack, receiver: int, moves: Sequence[Move]) -> Iterator[str]:
    """Yield differences between what a receiver expects and what is sent."""
    ends = {(move.source.rank, move.destination.rank, move.step) for move in moves}
    if ends != {(pack.source_rank, receiver, pack.step)}:
        yield f"has, for rank {receiver}, no moves or those of other ranks or of another step"
    if [move[:3] for move in moves] != [move[:3] for move in pack.moves[0]]:
        yield f"is not what rank {receiver} expects"
    if sum(move.num_elements for move in moves) != pack.num_elements:
        yield f"has not {pack.num_elements} elements for rank {receiver}"


def _in_place_faults(plan: Plan, pack: Pack) -> Iterator[str]:
    """Yield unstaged ends of messages that are not contiguous in memory."""
    holder = plan.destination if pack.step else plan.source
    ends = [(pack.source_rank, holder, [move.source for move in pack.moves[0]], pack.sent_in_place)]
    for rank, moves, in_place in zip(pack.receivers, pack.moves, pack.received_in_place, strict=True):
        ends.append((rank, plan.destination, [move.destination for move in moves], in_place))
    for rank, layout, places, in_place in ends:
        if not in_place:
            continue
        parameter = _parameter(layout, places[0].rank, places[0].parameter) if len(places) == 1 else None
        if parameter is None or not _is_one_run(parameter.shape, pack.moves[0][0].box):
            yield f"is not one run of memory at rank {rank}, and has no staging there"


@lru_cache(maxsize=4096)
def _is_one_run(shape: tuple[int, ...], box: Box) -> bool:
    distance, stride = 0, 1
    for extent, size in zip(reversed(extents(box)), reversed(shape), strict=False):
        distance += (extent - 1) * stride
        stride *= size
    return distance + 1 == num_elements(box)


def _release_problems(plan: Plan, given_up: BucketOf) -> Iterator[str]:
    """Yield ranks that do not release exactly what their destination shard holds."""

    shards = plan.destination.shards

    @cache
    def returning(source_key: ShardKey, destination_key: ShardKey) -> set[str]:
        parameters = plan.source.shards[source_key].parameters
        return {one.name for one in parameters if _holds(shards[destination_key], one)}

    for rank in plan.ranks:
        found = set[str]()
        if rank in plan.source.keys and rank in plan.destination.keys:
            found = returning(plan.source.keys[rank], plan.destination.keys[rank])
        kept = []
        for parameter in plan.source.held(rank).parameters:
            name = parameter.name
            if (rank, name) not in given_up:
                kept.append(name)
                if name in found:
                    yield f"{_at(rank, name)} is kept, and is in the rank's destination shard as well"
            elif name not in found:
                yield f"{_at(rank, name)} is given up, and is not in the rank's destination shard"
        if list(plan.retained(rank)) != kept:
            yield f"rank {rank} keeps {kept}, and the plan says it retains {list(plan.retained(rank))}"


def _holds(shard: Shard, parameter: LocalParameter) -> bool:
    """True if a shard contains every element of a parameter."""
    for piece in parameter.pieces:
        parts = [intersect(piece.box, other.box) for _, other in shard.pieces.get(piece.tensor, ())]
        if union_elements(part for part in parts if part) < num_elements(piece.box):
            return False
    return True


def _piece_at(layout: Layout, place: Place, move: Move) -> Piece | None:
    """Return the piece of a layout that has the move's box at exactly this place."""
    parameter = _parameter(layout, place.rank, place.parameter)
    for piece in parameter.pieces if parameter else ():
        if piece.tensor != move.tensor:
            continue
        if move.box == piece.box and place.offset == piece.offset:
            return piece
        if _is_inside(move.box, piece.box):
            within = [a - b for (a, _), (b, _) in zip(move.box, piece.box, strict=True)]
            if [a - b for a, b in zip(place.offset, piece.offset, strict=True)] == within:
                return piece
    return None


def _is_inside(box: Box, other: Box) -> bool:
    return len(box) == len(other) and all(a <= b < c <= d for (b, c), (a, d) in zip(box, other, strict=True))


def _parameter(layout: Layout, rank: int, name: str) -> LocalParameter | None:
    return layout.held(rank).by_name.get(name)


def _named(table: dict[int, tuple[str, ...]]) -> dict[int, set[str]]:
    return {rank: set(names) for rank, names in table.items() if names}


def _at(rank: int, name: str) -> str:
    return f"{name} of rank {rank}"


def _show(move: Move) -> str:
    source, destination = move.source, move.destination
    return (
        f"{move.tensor}{list(move.box)} from {_at(source.rank, source.parameter)}"
        f" to {_at(destination.rank, destination.parameter)}"
    )
