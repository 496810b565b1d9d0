"""Damages to a plan, and the audit's message for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from hybridengine.reshard.audit import audit, audit_return
from hybridengine.reshard.compiler import compile_plan, inverse_local
from hybridengine.reshard.layout import Layout, LocalParameter, Piece, Shard, whole
from hybridengine.reshard.plan import Bucket, Move, Pack, Place, Plan
from hybridengine.topology.generation import Grouping
from hybridengine.topology.links import NodeMap
from tests.unit.numpy_shards import small_shape
from tests.unit.plan_cases import Case, fitting_shape

SHAPE = fitting_shape("qwen2", False, 2, 4)
(WHOLE,) = Case(SHAPE, "2-4-1", "1-1").plans(3000, NodeMap.uniform(8, 4), direct_elements=30)
"""Two steps over two nodes; messages with one box and several, in place and staged; every rank gives up its shard."""
(VANILLA,) = Case(fitting_shape("llama", False, 1, 4), "1-4-1", "1-2", grouping=Grouping.VANILLA).plans()
"""Ranks 1 and 2 retain parts that they do not generate with."""


def found(plan: Plan, wanted: Callable[[Bucket, Move], bool]) -> tuple[int, Move]:
    """Return the first move that is wanted, and the index of its bucket."""
    return next(
        (i, move) for i, bucket in enumerate(plan.buckets) for move in bucket.moves if wanted(bucket, move)
    )


def pack_of(plan: Plan, wanted: Callable[[Pack], bool]) -> tuple[int, Pack]:
    """Return the first message that is wanted, and the index of its bucket."""
    return next((i, pack) for i, bucket in enumerate(plan.buckets) for pack in bucket.packs if wanted(pack))


def with_bucket(plan: Plan, index: int, **changes: object) -> Plan:
    buckets = list(plan.buckets)
    buckets[index] = dataclasses.replace(buckets[index], **changes)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(plan, buckets=tuple(buckets))


def with_pack(plan: Plan, index: int, pack: Pack, *instead: Pack) -> Plan:
    packs = [one for old in plan.buckets[index].packs for one in (instead if old is pack else (old,))]
    return with_bucket(plan, index, packs=tuple(packs))


def with_move(plan: Plan, index: int, move: Move, *instead: Move) -> Plan:
    """Return the plan with other moves instead of one, both in the bucket's list and in its message."""

    def changed(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(one for old in moves for one in (instead if old == move else (old,)))

    bucket = plan.buckets[index]
    packs = tuple(
        dataclasses.replace(pack, moves=tuple(changed(moves) for moves in pack.moves))
        for pack in bucket.packs
    )
    return with_bucket(plan, index, moves=changed(bucket.moves), packs=packs)


def is_local(bucket: Bucket, move: Move) -> bool:
    return move.is_local


def is_remote(bucket: Bucket, move: Move) -> bool:
    return not move.is_local


def is_passed_on(bucket: Bucket, move: Move) -> bool:
    return move.step == 1


def shifted(place: Place) -> Place:
    """Return the place one row further."""
    return place._replace(offset=(place.offset[0] + 1, *place.offset[1:]))


def given_up_with(plan: Plan, rank: int, name: str) -> int:
    """Return the index of the bucket after which a rank gives up a parameter."""
    return next(i for i, bucket in enumerate(plan.buckets) if name in bucket.sources.get(rank, ()))


def moves_damaged() -> Iterator[tuple[str, Plan]]:
    """Yield (expected message, plan) for moves that are dropped, doubled or changed."""
    index, move = found(WHOLE, is_local)
    yield f"{move.num_elements} elements of {move.tensor}", with_move(WHOLE, index, move)
    yield "are written again", with_move(WHOLE, index, move, move, move)
    smaller = ((move.box[0][0], move.box[0][1] - 1), *move.box[1:])
    yield "are not written", with_move(WHOLE, index, move, move._replace(box=smaller))
    yield "reads what is not there", with_move(WHOLE, index, move, move._replace(source=shifted(move.source)))
    yield "is a local copy of step 1", with_move(WHOLE, index, move, move._replace(step=1))
    moved = with_bucket(with_move(WHOLE, index, move), -1, moves=(*WHOLE.buckets[-1].moves, move))
    yield "writes into a parameter that this bucket does not fill", moved
    yield "is of a tensor of no bucket, or of another", moved
    index, move = found(WHOLE, is_remote)
    bent = with_move(WHOLE, index, move, move._replace(destination=shifted(move.destination)))
    yield "writes what does not belong there", bent
    other = next(rank for rank in WHOLE.ranks if move.tensor not in WHOLE.source.shard(rank).pieces)
    elsewhere = move._replace(source=move.source._replace(rank=other))
    yield "reads what is not there", with_move(WHOLE, index, move, elsewhere)
    yield "passes on what no move of step 0 has brought", with_move(WHOLE, index, move, move._replace(step=1))
    yield "leaves the domain", dataclasses.replace(WHOLE, ranks=WHOLE.ranks[:-1])
    index, move = found(WHOLE, is_passed_on)
    yield "reads what is not there", with_move(WHOLE, index, move, move._replace(step=0))
    yield "is of step 2; there are 0 and 1", with_move(WHOLE, index, move, move._replace(step=2))
    _, brought = found(WHOLE, lambda _, one: one.destination == move.source and one.box == move.box)
    yield "passes on what no move of step 0 has brought", with_move(WHOLE, index, brought)


def messages_damaged() -> Iterator[tuple[str, Plan]]:
    """Yield (expected message, plan) for messages that are dropped, doubled, mixed up, or have wrong flags."""
    index, pack = pack_of(WHOLE, lambda pack: len(pack.receivers) > 1 and len(pack.moves[0]) > 1)
    yield "is in no message", with_pack(WHOLE, index, pack)
    yield "is in a message, and no move of the bucket", with_pack(WHOLE, index, pack, pack, pack)
    bucket = WHOLE.buckets[index]
    fewer = tuple(move for move in bucket.moves if move != pack.moves[0][0])
    yield "is in a message, and no move of the bucket", with_bucket(WHOLE, index, moves=fewer)

    def changed(**changes: object) -> Plan:
        wrong = dataclasses.replace(pack, **changes)  # pyright: ignore[reportArgumentType]
        return with_pack(WHOLE, index, pack, wrong)

    first, second, *_ = pack.receivers
    yield "no moves or those of other ranks", changed(receivers=(second, first, *pack.receivers[2:]))
    yield "no moves or those of other ranks", changed(moves=((), *pack.moves[1:]))
    yield "no moves or those of other ranks", changed(source_rank=first)
    yield "no moves or those of other ranks or of another step", changed(step=1 - pack.step)
    yield (
        f"is not what rank {second} expects",
        changed(moves=(pack.moves[0], pack.moves[1][::-1], *pack.moves[2:])),
    )
    yield "lists of moves and", changed(received_in_place=pack.received_in_place[1:])
    yield "lists of moves and", changed(receivers=pack.receivers[1:])
    yield "goes to a rank twice", changed(receivers=(second, *pack.receivers[1:]))
    yield f"has not {pack.num_elements + 1} elements", changed(num_elements=pack.num_elements + 1)
    yield f"one run of memory at rank {pack.source_rank}", changed(sent_in_place=True)
    yield f"one run of memory at rank {first}", changed(received_in_place=(True, *pack.received_in_place[1:]))
    index, pack = pack_of(WHOLE, lambda pack: pack.sent_in_place and not any(pack.received_in_place))
    yield (
        f"one run of memory at rank {pack.receivers[-1]}",
        changed(received_in_place=(*pack.received_in_place[:-1], True)),
    )


def tables_damaged() -> Iterator[tuple[str, Plan]]:
    """Yield (expected message, plan) for wrong tables of what buckets hold, fill and give up."""
    first, second = WHOLE.buckets[:2]
    twice = (*second.tensors, first.tensors[0])
    yield f"{first.tensors[0]} is in bucket 0 and in bucket 1", with_bucket(WHOLE, 1, tensors=twice)
    rank, (name,) = next((rank, names) for rank, names in first.destinations.items() if len(names) == 1)
    without = with_bucket(WHOLE, 0, destinations=first.destinations | {rank: ()})
    yield f"no bucket fills {name} of rank {rank}", without
    more = second.destinations | {rank: (*second.destinations[rank], name)}
    yield f"fills {name} of rank {rank}, and so does bucket 0", with_bucket(WHOLE, 1, destinations=more)
    yield (
        "which the domain does not have",
        with_bucket(WHOLE, 1, destinations=second.destinations | {99: (name,)}),
    )
    yield "which the domain does not have", with_bucket(WHOLE, 1, sources=second.sources | {0: ("weight",)})
    # a parameter given up one bucket too early, never, and although it cannot be restored from the destination shard
    rank, name = 0, WHOLE.source.shard(0).parameters[-1].name
    index = given_up_with(WHOLE, rank, name)
    sources = WHOLE.buckets[index].sources
    never = with_bucket(WHOLE, index, sources=sources | {rank: tuple(n for n in sources[rank] if n != name)})
    yield f"{name} of rank {rank} is kept, and is in the rank's destination shard as well", never
    before = never.buckets[index - 1].sources
    early = with_bucket(never, index - 1, sources=before | {rank: (*before.get(rank, ()), name)})
    yield f"reads what bucket {index - 1} has given up", early
    yield f"gives up {name} of rank {rank}, which holds tensors of other buckets", early
    name = VANILLA.retained(1)[0]
    (index,) = (
        i for i, bucket in enumerate(VANILLA.buckets) if tensor_of(VANILLA, 1, name) in bucket.tensors
    )
    sources = VANILLA.buckets[index].sources
    lost = with_bucket(VANILLA, index, sources=sources | {1: (*sources[1], name)})
    yield f"{name} of rank 1 is given up, and is not in the rank's destination shard", lost


def tensor_of(plan: Plan, rank: int, name: str) -> str:
    return plan.source.shard(rank).by_name[name].tensor


DAMAGES = [
    pytest.param(plan, problem, id=f"{kind.__name__} {number}")
    for kind in (moves_damaged, messages_damaged, tables_damaged)
    for number, (problem, plan) in enumerate(kind())
]


def test_what_is_damaged_here_is_right_before() -> None:
    for plan in (WHOLE, VANILLA):
        assert audit(plan) == [] and audit_return(plan, inverse_local(plan)) == []
    assert WHOLE.num_steps == 2 and VANILLA.retained(1) and not VANILLA.retained(0)


@pytest.mark.parametrize(("plan", "problem"), DAMAGES)
def test_damage_is_found(plan: Plan, problem: str) -> None:
    problems = audit(plan)
    assert any(problem in one for one in problems), problems


def test_retained_is_what_the_audit_finds_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "retained", lambda self, rank: ())
    name = VANILLA.source.shard(1).parameters[0].name
    assert any(f"rank 1 keeps ['{name}'" in problem for problem in audit(VANILLA))


def returns_damaged() -> Iterator[tuple[str, Plan]]:
    """Yield (expected message, plan) for damages of the way back from WHOLE."""
    back = inverse_local(WHOLE)
    index, move = found(back, is_local)
    yield "are not written", with_move(back, index, move)
    yield "are written again", with_move(back, index, move, move, move)
    yield "reads what is not there", with_move(back, index, move, move._replace(source=shifted(move.source)))
    yield "between other layouts or ranks", WHOLE
    yield "between other layouts or ranks", dataclasses.replace(back, ranks=back.ranks[::-1])
    yield f"{len(back.buckets)} buckets there", dataclasses.replace(back, buckets=back.buckets[:-1])
    yield "does not restore what was given up there", with_bucket(back, index, destinations={})
    yield "does not give up what was filled there", with_bucket(back, index, sources={})
    yield "moves something between ranks", with_bucket(back, 0, packs=WHOLE.buckets[0].packs)
    from_another = move._replace(source=move.source._replace(rank=(move.source.rank + 1) % 8))
    yield "moves something between ranks", with_move(back, index, move, from_another)


@pytest.mark.parametrize(
    ("back", "problem"), [pytest.param(plan, problem, id=problem) for problem, plan in returns_damaged()]
)
def test_damage_of_the_way_back_is_found(back: Plan, problem: str) -> None:
    problems = audit_return(WHOLE, back)
    assert any(problem in one for one in problems), problems


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([((0, 4), 0), ((4, 6), 3)], "overlap"),
        ([((0, 4), 0), ((4, 6), 5)], "leaves the parameter"),
        ([((0, 4), 0), ((5, 7), 4)], f"leaves {NORM}"),
        ([((0, 4), 0), ((4, 4), 4)], "leaves the parameter"),
    ],
)
def test_layouts_that_contradict_themselves_are_named(
    pieces: list[tuple[tuple[int, int], int]], problem: str
) -> None:
    """The norm and its parameter have 6 elements; each piece is (interval, index in the parameter)."""
    shape = small_shape(layers=1)
    whole_norm = Layout(shape, {0: ()}, {(): Shard((whole("norm", NORM, (6,)),))}, kind="whole")
    parameter = LocalParameter("norm", (6,), tuple(Piece(NORM, (rows,), (at,)) for rows, at in pieces))
    odd = Layout(shape, {0: ()}, {(): Shard((parameter,))}, kind="odd")
    for plan in (Plan(whole_norm, odd, (0,), ()), Plan(odd, whole_norm, (0,), ())):
        problems = audit(plan)
        assert problems and all("norm of shard () in odd has" in one for one in problems)
        assert any(problem in one for one in problems)


def test_different_models_are_refused() -> None:
    plan = compile_plan(VANILLA.source, VANILLA.destination, VANILLA.ranks)
    mixed = dataclasses.replace(plan, destination=WHOLE.destination)
    assert audit(mixed) == ["megatron 1-4-1 and vllm 1-1 describe different models"]
