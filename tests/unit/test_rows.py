"""References to rows against the same operations on a TensorDict, and what each rank asks for."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from hybridengine.controller.rows import Batches, Produced, Rows, Source
from hybridengine.errors import ProtocolError
from hybridengine.protocols import even_split
from hybridengine.runtime.row_reader import RowReader
from hybridengine.runtime.row_requests import ROW_NUMBERS
from hybridengine.runtime.row_store import RowStore
from hybridengine.runtime.stored_rows import StoredRows

NUM_ROWS = 7


@dataclass(frozen=True)
class Ended:
    """What `Rows` asks of a call: its name. The rows themselves are kept by a real store of this process."""

    operation: str
    references: list[StoredRows]


def columns(**tensors: torch.Tensor) -> TensorDict:
    return TensorDict(tensors, batch_size=[NUM_ROWS])  # pyright: ignore[reportArgumentType]


NUMBERS = torch.arange(NUM_ROWS)
FIRST = columns(tokens=NUMBERS.view(-1, 1) * 10 + torch.arange(3), scores=NUMBERS / 4)
SECOND = columns(scores=NUMBERS * -1.0, values=NUMBERS + 0.5)
STORE = RowStore("127.0.0.1", b"secret")


def produced(key: int, name: str, batch: TensorDict, sizes: tuple[int, ...]) -> Produced:
    """Rows of a call whose source ranks have returned so many each."""
    first_rows = np.cumsum([0, *sizes[:-1]]).tolist()
    stored = [
        STORE.keep(10 * key + number, batch[first : first + size].clone())
        for number, (first, size) in enumerate(zip(first_rows, sizes, strict=True))
    ]
    ranks = tuple(range(len(sizes)))
    return Produced(Ended(name, stored), tuple(first_rows), NUM_ROWS, 10 * key, ranks, POOL)  # type: ignore[arg-type]


POOL = object()
ONE = produced(1, "actor.one", FIRST, (3, 4))
TWO = produced(2, "critic.two", SECOND, (1, 5, 1))


def fetch(rows: Rows, wanted: range, names: tuple[str, ...] | None = None) -> TensorDict:
    """As a rank that was sent the request."""
    batches = Batches()
    request = pickle.loads(pickle.dumps(rows.request(wanted, names, batches)))
    return request.fetch(batches.references, RowReader(b"secret", 5.0))


steps = st.one_of(
    st.tuples(st.just("slice"), st.slices(NUM_ROWS)),
    st.tuples(st.just("repeat"), st.integers(1, 3)),
    st.tuples(st.just("pad"), st.integers(1, 5)),
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
    for wanted in even_split(len(rows), num_parts):
        found = fetch(rows, wanted)
        assert set(found.keys()) == set(expected.keys())
        for name in expected.keys():  # noqa: SIM118  # a TensorDict iterates over its rows
            assert torch.equal(found[name], expected[name][wanted.start : wanted.stop])


def test_a_rank_asks_for_the_columns_and_rows_that_it_needs() -> None:
    rows = Rows([Source(ONE)], NUM_ROWS).union(Rows.of(columns(extra=NUMBERS, other=NUMBERS)))
    batches = Batches()
    request = rows.request(range(2, 5), ["tokens", "extra"], batches)
    stored, local = request.origins
    assert not isinstance(stored, TensorDict)
    assert isinstance(local, TensorDict)
    assert stored.rows.tolist() == [2, 3, 4]
    assert stored.blocks == ((0, 0), (3, 1))
    assert set(local.keys()) == {"extra"}
    assert local["extra"].tolist() == [2, 3, 4]
    assert local["extra"].untyped_storage().nbytes() == 3 * 8, "the whole column would travel"
    fetched = request.fetch(batches.references, RowReader(b"secret", 5.0))
    assert set(fetched.keys()) == {"tokens", "extra"}


def test_only_batches_with_wanted_rows_are_waited_for_and_none_of_the_readers_own() -> None:
    rows = Rows([Source(TWO)], NUM_ROWS)
    for pool, rank, wanted, blocks in (
        (None, None, range(1, 6), ((1, 0),)),
        (None, None, range(2), ((0, 0), (1, 1))),
        (POOL, 1, range(7), ((0, 0), (1, None), (6, 1))),
        (object(), 1, range(7), ((0, 0), (1, 1), (6, 2))),
        (POOL, 0, range(6, 7), ((6, 0),)),
    ):
        batches = Batches(pool, rank)
        request = rows.request(wanted, ["values"], batches)
        (origin,) = request.origins
        assert not isinstance(origin, TensorDict)
        assert origin.blocks == blocks
        assert len(batches.references) == sum(place is not None for _, place in blocks)
        own = {20: TWO.future.references[1]}  # what rank 1 has under the call's key
        fetched = request.fetch(batches.references, RowReader(b"secret", 5.0), own=own.__getitem__)  # pyright: ignore[reportArgumentType]
        assert torch.equal(fetched["values"], SECOND["values"][wanted.start : wanted.stop])


def test_rows_without_columns_have_numbers() -> None:
    found = fetch(Rows.numbered(10)[::2], range(1, 4), (ROW_NUMBERS,))
    assert found[ROW_NUMBERS].tolist() == [1, 2, 3]


def test_values_that_are_not_tensors() -> None:
    texts = TensorDict({"texts": NonTensorStack(*"abcdefg")}, batch_size=[NUM_ROWS])
    stored = STORE.keep(90, texts.clone())
    made = Produced(Ended("reward.texts", [stored]), (0,), NUM_ROWS, 90, (0,), POOL)  # type: ignore[arg-type]
    request = Rows([Source(made)], NUM_ROWS)[[6, 0, 0]].request(range(3), None, batches := Batches())
    assert request.fetch(batches.references, RowReader(b"secret", 5.0)).get("texts").tolist() == [
        "g",
        "a",
        "a",
    ]


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
        request = of.request(range(2, 5), ["tokens"], batches := Batches(), ["values", "weights"])
        found = request.fetch(batches.references, RowReader(b"secret", 1.0))
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


def test_sizes_that_make_no_sense():
    rows = Rows.numbered(4)
    for times in (-1, 1.5, True):
        with pytest.raises(ProtocolError, match=f"repeated {times} times; choose a whole number from 0 on"):
            rows.repeat(times)  # type: ignore[arg-type]
    for size in (0, 2.0):
        with pytest.raises(ProtocolError, match=f"a multiple of {size}; choose a whole number from 1 on"):
            rows.pad_to_multiple(size)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=r"rows\.select\(\['tokens'\]\): columns are named by texts"):
        rows.select(["tokens"])  # type: ignore[arg-type]
    assert len(rows.repeat(0)) == 0
