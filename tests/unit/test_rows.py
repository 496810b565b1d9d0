"""References to rows, compared with the same operations on a TensorDict, and the request of each rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from hybridengine.controller.row_requests import (
    ColumnRows,
    Received,
    RowsRequest,
    find_batches,
    read_columns,
)
from hybridengine.controller.rows import Batches, Produced, Rows, Source
from hybridengine.controller.stored_rows import Content, Owner, StoredRows, store_rows
from hybridengine.errors import ProtocolError, TransferError
from hybridengine.rows.protocols import ROW_NUMBERS, even_split

NUM_ROWS = 7


@dataclass(frozen=True)
class Ended:
    """The parts of a call that `Rows` needs: its name, and descriptions of its rows."""

    name: str
    batches: list[StoredRows]

    def __str__(self) -> str:
        return self.name


def columns(**tensors: torch.Tensor) -> TensorDict:
    return TensorDict(tensors, batch_size=[NUM_ROWS])  # pyright: ignore[reportArgumentType]


NUMBERS = torch.arange(NUM_ROWS)
FIRST = columns(tokens=NUMBERS.view(-1, 1) * 10 + torch.arange(3), scores=NUMBERS / 4)
SECOND = columns(scores=NUMBERS * -1.0, values=NUMBERS + 0.5)
OBJECTS: list[Content] = []
"""An object store; references are indices into it."""


def put(content: Content) -> int:
    OBJECTS.append(pickle.loads(pickle.dumps(content)))
    return len(OBJECTS) - 1


def get(references: list[int], timeout: float) -> list[Content]:
    return [OBJECTS[reference] for reference in references]


@contextmanager
def object_store() -> Iterator[pytest.MonkeyPatch]:
    """While open, `OBJECTS` replaces Ray's store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.put", put)
        patch.setattr("ray.get", get)
        yield patch


def fetch_request(
    request: RowsRequest, batches: Batches, reader: Owner | None = None
) -> tuple[TensorDict, Received]:
    with object_store():
        stored = {number: batch for batch, number in batches.items()}
        return request.fetch(stored, 1.0, reader)  # type: ignore[arg-type]


def read_wanted(wanted: dict[str, ColumnRows], reader: Owner | None = None) -> Received:
    with object_store():
        return read_columns(wanted, 1.0, reader)


def owner(rank: int) -> Owner:
    return Owner("10.0.0.1", 100 + rank, rank)


def store(batch: TensorDict, rank: int = 0, inline_bytes: int = 2**16) -> StoredRows:
    with object_store() as patch:
        patch.setattr("hybridengine.controller.stored_rows.INLINE_BYTES", inline_bytes)
        return store_rows(batch, owner(rank))


def produced(name: str, batch: TensorDict, sizes: tuple[int, ...]) -> Produced:
    """Return the rows of a call whose source ranks have returned `sizes` rows each."""
    first_rows = np.cumsum([0, *sizes[:-1]]).tolist()
    stored = [
        store(batch[first : first + size], rank, inline_bytes=48)
        for rank, (first, size) in enumerate(zip(first_rows, sizes, strict=True))
    ]
    return Produced((Ended(name, stored),), np.array(first_rows), NUM_ROWS)  # type: ignore[arg-type]


ONE = produced("actor.one", FIRST, (3, 4))
TWO = produced("critic.two", SECOND, (1, 5, 1))


def fetch(rows: Rows, wanted: range, names: tuple[str, ...] | None = None) -> TensorDict:
    """Fetch rows as a rank that received the request."""
    batches: Batches = {}
    request = pickle.loads(pickle.dumps(rows.request(wanted, names, batches)))
    return fetch_request(request, batches)[0]


steps = st.one_of(
    st.tuples(st.just("slice"), st.slices(NUM_ROWS)),
    st.tuples(st.just("repeat"), st.integers(1, 3)),
    st.tuples(st.just("pad"), st.integers(1, 5)),
    st.tuples(st.just("concat"), st.slices(NUM_ROWS)),
    st.tuples(st.just("shuffle"), st.randoms(use_true_random=False)),
    st.tuples(st.just("mask"), st.integers(0, 2**16 - 1)),
    st.tuples(st.just("select"), st.sets(st.sampled_from(["tokens", "scores", "values"]), min_size=1)),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(steps, max_size=5), st.integers(1, 4))
def test_operations_are_those_of_a_tensordict(operations: list[tuple], num_parts: int) -> None:
    rows = Rows([Source(ONE)], NUM_ROWS).union(Rows([Source(TWO)], NUM_ROWS), columns(extra=NUMBERS + 100))
    expected = FIRST.clone().update(SECOND).update({"extra": NUMBERS + 100})
    for name, value in operations:
        count = len(rows)
        if name == "slice":
            rows, expected = rows[value], expected[torch.tensor(range(count)[value], dtype=torch.long)]
        elif name == "repeat":
            rows, expected = rows.repeat(value), expected[torch.arange(count).repeat_interleave(value)]
        elif name == "pad" and count:
            missing = -count % value
            rows = rows.pad_to_multiple(value)
            expected = expected[torch.tensor([*range(count), *(row % count for row in range(missing))])]
        elif name == "concat":
            more = torch.tensor(range(count)[value], dtype=torch.long)
            rows = rows[1:].concat(rows[value], rows[:1])
            expected = expected[torch.cat([torch.arange(count)[1:], more, torch.arange(count)[:1]])]
        elif name == "shuffle":
            order = value.sample(range(count), count)
            rows, expected = rows[order], expected[torch.tensor(order, dtype=torch.long)]
        elif name == "mask":
            mask = torch.tensor([bool(value >> row % 16 & 1) for row in range(count)], dtype=torch.bool)
            rows, expected = rows[mask], expected[mask]
        elif name == "select":
            rows = rows.select(*value)
            expected = expected.select(*(set(expected.keys()) & value))
    assert len(rows) == len(expected)
    if len(rows) < num_parts:
        return
    batches: Batches = {}
    whole = rows.request(range(len(rows)), None, batches)
    for wanted in even_split(len(rows), num_parts):
        found = fetch(rows, wanted)
        assert set(found.keys()) == set(expected.keys())
        cut = whole.cut(wanted)  # by a rank, from the rows of all ranks below its relay
        assert cut.batches <= set(batches.values())
        if len(wanted):
            needed = dict(zip(batches.values(), batches, strict=True))
            with object_store():
                few = {number: needed[number] for number in cut.batches}
                assert (cut.fetch(few, 1.0)[0] == found).all()  # type: ignore[arg-type]
        for name in expected.keys():  # noqa: SIM118  # a TensorDict iterates over its rows
            assert torch.equal(found[name], expected[name][wanted.start : wanted.stop])


def test_a_rank_asks_for_the_columns_and_rows_that_it_needs() -> None:
    rows = Rows([Source(ONE)], NUM_ROWS).union(Rows.of(columns(extra=NUMBERS, other=NUMBERS)))
    batches: Batches = {}
    request = rows.request(range(2, 5), ["tokens", "extra"], batches)
    stored, local = request.origins
    assert not isinstance(stored, TensorDict)
    assert isinstance(local, TensorDict)
    assert stored.rows.tolist() == [2, 3, 4]
    assert stored.blocks == ((0, 0), (3, 1))
    assert set(local.keys()) == {"extra"}
    assert local["extra"].tolist() == [2, 3, 4]
    assert local["extra"].untyped_storage().nbytes() == 3 * 8, "the whole column would travel"
    fetched, received = fetch_request(request, batches, owner(1))
    assert set(fetched.keys()) == {"tokens", "extra"}
    assert received.transferred == {"actor.one": 1 * 3 * 8}, "rank 1 has the other two rows"


def test_only_batches_with_wanted_rows_are_waited_for() -> None:
    rows = Rows([Source(TWO)], NUM_ROWS)
    for wanted, blocks in (
        (range(1, 6), ((1, 0),)),
        (range(2), ((0, 0), (1, 1))),
        (range(7), ((0, 0), (1, 1), (6, 2))),
        (range(6, 7), ((6, 0),)),
    ):
        batches: Batches = {}
        request = rows.request(wanted, ["values"], batches)
        (origin,) = request.origins
        assert not isinstance(origin, TensorDict)
        assert origin.blocks == blocks
        assert len(batches) == len(blocks)
        fetched, _ = fetch_request(request, batches)
        assert torch.equal(fetched["values"], SECOND["values"][wanted.start : wanted.stop])


def mixed_batch(first: int, count: int) -> TensorDict:
    """Return columns of many types."""
    numbers = torch.arange(first, first + count)
    return TensorDict(
        {
            "numbers": numbers,
            "wide": (numbers.view(-1, 1, 1) * 100.0 + torch.arange(6.0).view(3, 2)).transpose(1, 2),
            "half": numbers.to(torch.bfloat16),
            "flags": numbers % 2 == 0,
            "sliced": (numbers.view(-1, 1) * 10.0 + torch.arange(3.0))[
                :, 1
            ],  # of one row: contiguous with stride 3
            "empty": torch.empty(count, 0),
            "texts": NonTensorStack(*[f"é{number}" * number for number in numbers.tolist()]),
            "lists": NonTensorStack(*[{"n": number} for number in numbers.tolist()]),
        },
        batch_size=[count],
    )


WHOLE = mixed_batch(0, 9)
BLOCKS = {
    inline_bytes: [
        (first, store(mixed_batch(first, count), rank, inline_bytes))
        for rank, (first, count) in enumerate(((0, 3), (3, 1), (4, 5)))
    ]
    for inline_bytes in (0, 2**16)
}


def read(rows: list[int], inline_bytes: int, reader: Owner | None = None, *names: str) -> Received:
    blocks = BLOCKS[inline_bytes]
    wanted = {name: ColumnRows("a.call", name, blocks, np.array(rows, dtype=np.int64)) for name in names}
    return read_wanted(wanted, reader)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 8), max_size=20), st.sampled_from([*BLOCKS]))
def test_columns_of_every_type_in_any_order(rows: list[int], inline_bytes: int) -> None:
    found = read(rows, inline_bytes, None, "numbers", "wide", "half", "flags", "sliced", "empty").columns
    for name, column in found.items():
        assert isinstance(column, torch.Tensor)
        assert column.dtype == WHOLE[name].dtype
        assert torch.equal(column, WHOLE[name][rows])
        assert column.is_inference(), "an in-place operation raises"
    if rows:
        for name, column in read(rows, inline_bytes, None, "texts", "lists").columns.items():
            expected = list(WHOLE[name])
            assert column.tolist() == [expected[row] for row in rows]


def test_each_row_counts_once_and_a_ranks_own_not_at_all() -> None:
    rows = [8, 1, 1, 8, 8, 3]
    for inline_bytes, object_bytes in ((0, 3 * 24), (2**16, 0)):
        received = read(rows, inline_bytes, owner(0), "wide")
        assert received.transferred == {"a.call": 2 * 24}, "row 1 is the reader's own"
        assert received.object_bytes == object_bytes
    texts = read([8, 8, 2], 0, owner(0), "texts")
    assert texts.transferred == {"a.call": len(pickle.dumps("é8" * 8))}


def test_the_smallest_columns_travel_inside_the_description() -> None:
    batch = TensorDict(
        {"ids": torch.arange(4), "flags": torch.ones(4, dtype=torch.bool), "wide": torch.ones(4, 9)},
        batch_size=[4],
    )
    kept = len(OBJECTS)
    stored = store(batch, inline_bytes=36)
    assert {name: column.is_inline for name, column in stored.columns.items()} == {
        "flags": True,
        "ids": True,
        "wide": False,
    }
    assert stored.inline_bytes == 4 + 32
    assert [len(content) for content in OBJECTS[kept:]] == [4]


def test_ranks_must_return_the_same_columns() -> None:
    odd = store(TensorDict({"wide": torch.ones(2, 3, 2)}, batch_size=[2]), rank=1)
    wanted = ColumnRows("a.call", "wide", [BLOCKS[0][0], (3, odd)], np.arange(5))
    with pytest.raises(
        TransferError, match=r"is torch\.float32\[2, 3\] on rank 0 .* and torch\.float32\[3, 2\] on rank 1"
    ):
        read_wanted({"wide": wanted})
    wanted = ColumnRows("a.call", "half", [BLOCKS[0][0], (3, odd)], np.arange(5))
    with pytest.raises(TransferError, match=r"torch\.bfloat16\[\] on rank 0 .* and missing on rank 1"):
        read_wanted({"half": wanted})


def test_rows_without_columns_have_numbers() -> None:
    found = fetch(Rows.numbered(10)[::2], range(1, 4), (ROW_NUMBERS,))
    assert found[ROW_NUMBERS].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([7], "row 7 of 7 rows"),
        ([-8, 2], "row -8 of 7 rows"),
        ([0.5], "found float64"),
        ([[0]], r"found int64\[1, 1\]"),
        (torch.ones(6, dtype=torch.bool), "7 truth values"),
    ],
)
def test_rows_that_are_not_there_are_refused(index, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Rows.numbered(7)[index]


def test_other_numbers_of_rows_cannot_stand_side_by_side() -> None:
    with pytest.raises(ProtocolError, match="7 rows and 3 rows cannot stand side by side"):
        Rows.numbered(7).union(Rows.numbered(7)[:3])


def test_rows_of_other_methods_cannot_follow_one_another() -> None:
    one, two = Rows([Source(ONE)], NUM_ROWS), Rows([Source(TWO)], NUM_ROWS)
    for others in (two, one.union(two), one.select("tokens"), columns(extra=NUMBERS)):
        with pytest.raises(
            ProtocolError, match=r"7 rows of actor.one\) and .* cannot follow one another; join rows"
        ):
            one.concat(Rows.of(others) if isinstance(others, TensorDict) else others)


def test_a_column_that_nobody_has_produced_is_named() -> None:
    with pytest.raises(
        ProtocolError, match=r"columns \['values'\] are needed.*there are \['scores', 'tokens'\]"
    ):
        fetch(Rows([Source(ONE)], NUM_ROWS), range(2), ("tokens", "values"))
    here = Rows.of(columns(ids=NUMBERS, other=NUMBERS)).select_as(own="ids", gone="nothing")
    with pytest.raises(ProtocolError, match=r"columns \['nope'\] are needed.*there are \['own'\]"):
        fetch(here, range(2), ("nope",))


def test_negative_numbers_count_from_the_end() -> None:
    found = fetch(Rows([Source(ONE)], NUM_ROWS)[[-1, 0, -NUM_ROWS]][[-1, -3]], range(2))
    assert torch.equal(found["tokens"], FIRST["tokens"][[0, NUM_ROWS - 1]])


def test_optional_columns_come_where_they_are_there() -> None:
    rows = Rows([Source(ONE), Source(TWO)], NUM_ROWS)
    for of, expected in ((rows, ["tokens", "values"]), (rows.select("tokens"), ["tokens"])):
        request = of.request(range(2, 5), ["tokens"], batches := {}, ["values", "weights"])
        found, _ = fetch_request(request, batches)
        assert sorted(found.keys()) == expected
        assert torch.equal(found["tokens"], FIRST["tokens"][2:5])
        if "values" in expected:
            assert torch.equal(found["values"], SECOND["values"][2:5])


@pytest.mark.parametrize("here", [True, False], ids=["of the controller", "of ranks"])
def test_columns_by_other_names(here: bool) -> None:
    both = FIRST.clone().update(SECOND)
    rows = Rows.of(both) if here else Rows([Source(ONE), Source(TWO)], NUM_ROWS)
    renamed = rows.select_as(returns="values", ids="tokens", old="scores").union(
        rows.select_as(tokens="scores")
    )
    found = fetch(renamed[::-1], range(NUM_ROWS))
    assert sorted(found.keys()) == ["ids", "old", "returns", "tokens"]
    for name, of in (("returns", "values"), ("ids", "tokens"), ("old", "scores"), ("tokens", "scores")):
        assert torch.equal(found[name], both[of].flip(0))
    again = fetch(renamed.select_as(last="returns", gone="nothing"), range(2), ("last",))
    assert torch.equal(again["last"], both["values"][:2])
    with pytest.raises(ProtocolError, match=r"columns \['gone'\] are needed"):
        fetch(renamed.select_as(gone="values"), range(2), ("gone",))


def test_a_column_that_some_ranks_lack_is_an_error_also_where_it_is_optional() -> None:
    halves = (FIRST.select("scores")[:3], FIRST[3:])
    stored = [store(half, rank, inline_bytes=48) for rank, half in enumerate(halves)]
    rows = Rows([Source(Produced((Ended("compute.map", stored),), np.array([0, 3]), NUM_ROWS))], NUM_ROWS)  # type: ignore[arg-type]
    batches: Batches = {}
    request = rows.request(range(NUM_ROWS), ("scores",), batches, optional=("tokens",))
    with pytest.raises(TransferError, match=r"column 'tokens' of compute\.map is missing on rank 0"):
        fetch_request(request, batches)


@pytest.mark.parametrize("rows", [[1], [0, 1], [1, 0]])
def test_rows_may_be_empty(rows: list[int]) -> None:
    batch = TensorDict({"ids": torch.zeros(2, 3, 0, dtype=torch.int64)}, batch_size=[2])
    found = read_wanted({"ids": ColumnRows("a.call", "ids", [(0, store(batch))], np.array(rows))})
    assert found.columns["ids"].shape == (len(rows), 3, 0)
    assert found.columns["ids"].dtype == torch.int64


def test_batches_are_found_below_relays() -> None:
    """Beside a batch that a rank has returned, one below a relay, and one below two."""
    first, second, third = (store(FIRST[row : row + 1], row) for row in range(3))
    with object_store():
        below = put([put(second), put(None)])  # type: ignore[arg-type, list-item]
        relay = put([put([below]), put([put([put(first), put(third)])])])  # type: ignore[arg-type, list-item]
        values = [(first, ()), ([below], (0,)), ([relay], (1, 1)), ([below], (1,))]
        found = find_batches(values, timeout_s=1.0)
    assert [None if one is None else one.owner.rank for one in found] == [0, 1, 2, None]
