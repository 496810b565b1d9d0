"""Rows that other processes keep, read from their memory and over TCP: equal values, and errors that say what is."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from hybridengine.errors import StorageError, TransferError
from hybridengine.runtime import row_store
from hybridengine.runtime.row_reader import Block, RowReader
from hybridengine.runtime.row_store import MAPPED_BYTES, RowStore
from hybridengine.runtime.stored_rows import StoredRows

SECRET = b"of this test"
SIZES = (3, 1, 5)
"""Rows that each of three processes keeps."""
NUM_ROWS = sum(SIZES)
ENTRY = MAPPED_BYTES // 8
"""Entries of a row of a column that is mapped, however few rows there are."""


def batch_of(first: int, count: int) -> TensorDict:
    numbers = torch.arange(first, first + count)
    return TensorDict(
        {
            "numbers": numbers,
            "wide": numbers.view(-1, 1, 1) * 100.0 + torch.arange(6.0).view(2, 3),
            "half": numbers.to(torch.bfloat16),
            "large": numbers.view(-1, 1) * ENTRY + torch.arange(ENTRY),
            "flags": numbers % 2 == 0,
            "texts": NonTensorStack(*[f"é{number}" * number for number in numbers.tolist()]),
            "lists": NonTensorStack(*[{"n": number} for number in numbers.tolist()]),
        },
        batch_size=[count],
    )


WHOLE = batch_of(0, NUM_ROWS)


def keep(channel: Connection, first: int, count: int) -> None:
    """A process that keeps rows under key 7 and does as it is told."""
    store = RowStore("127.0.0.1", SECRET)
    channel.send(store.keep(7, batch_of(first, count)))
    while (order := channel.recv()) != "end":
        if order == "drop":
            store.drop([7, 8])
        if order == "again":
            store.keep(9, batch_of(first, count))
        channel.send(store.num_bytes)


class Keeper:
    """Such a process, from outside."""

    def __init__(self, first: int, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["hybridengine.runtime.row_store"])  # what it imports uses no threads
        self._channel, theirs = context.Pipe()
        self.process = context.Process(target=keep, args=(theirs, first, count), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of a process that fails is heard
        self.stored: StoredRows = self._channel.recv()
        self.block = Block(first, self.stored)

    def order(self, what: str) -> int:
        self._channel.send(what)
        return self._channel.recv()

    def end(self) -> None:
        self._channel.send("end")
        self.process.join(10)


@pytest.fixture(scope="module")
def keepers() -> Iterator[list[Keeper]]:
    firsts = np.cumsum([0, *SIZES[:-1]]).tolist()
    made = [Keeper(first, count) for first, count in zip(firsts, SIZES, strict=True)]
    yield made
    for keeper in made:
        keeper.end()


def reader(near: bool, secret: bytes = SECRET) -> RowReader:
    made = RowReader(secret, timeout_s=5.0)
    if not near:
        made._own_host = "another machine"
    return made


@pytest.fixture(scope="module")
def readers() -> dict[bool, RowReader]:
    return {near: reader(near) for near in (True, False)}


def test_rows_stay_as_they_were_kept_whoever_writes_to_the_batch_afterwards() -> None:
    store, batch = RowStore("127.0.0.1", SECRET), batch_of(0, 2)
    try:
        block = Block(0, store.keep(1, batch))
        for name in ("numbers", "wide", "half", "large", "flags"):
            batch[name].zero_()
            found = reader(True).column(name, [block], np.arange(2))
            assert isinstance(found, torch.Tensor)
            assert torch.equal(found, WHOLE[name][:2]), name
    finally:
        store.close()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, NUM_ROWS - 1), max_size=20), st.booleans())
def test_rows_in_any_order_and_number_come_as_they_are(
    keepers: list[Keeper], readers: dict[bool, RowReader], rows: list[int], near: bool
) -> None:
    blocks, wanted = [keeper.block for keeper in keepers], np.array(rows, dtype=np.int64)
    for name in ("numbers", "wide", "half", "flags"):
        column = readers[near].column(name, blocks, wanted)
        assert isinstance(column, torch.Tensor)
        assert torch.equal(column, WHOLE[name][rows])
        assert column.dtype == WHOLE[name].dtype
        column.zero_()  # memory of the reader's own
    for name in ("texts", "lists") if rows else ():
        expected = list(WHOLE[name])
        assert readers[near].column(name, blocks, wanted).tolist() == [expected[row] for row in rows]


@pytest.mark.parametrize("near", [True, False])
def test_only_the_rows_that_are_wanted_are_fetched(keepers: list[Keeper], near: bool) -> None:
    one = reader(near)
    one.column("wide", [keeper.block for keeper in keepers], np.array([8, 1, 1, 8, 8]))
    assert one.received_bytes == 2 * 6 * 4


def test_no_message_waits_until_the_one_before_is_acknowledged() -> None:
    """Else every column that is fetched over TCP takes 40 ms more, and one of texts 80."""
    store = RowStore("127.0.0.1", SECRET)
    try:
        stored = store.keep(1, batch_of(0, 2))
        one = reader(near=False)
        column = one.column("wide", [Block(0, stored)], np.arange(2))
        assert isinstance(column, torch.Tensor) and torch.equal(column, WHOLE["wide"][:2])
        assert sends_at_once(stored.owner.port) == [True, True]
    finally:
        store.close()


def sends_at_once(port: int) -> list[bool]:
    """Of each end that this process has of connections to a port."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        # OSError: of a descriptor closed meanwhile, or a socket that has no other end.
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as twin:
                is_tcp = twin.family == socket.AF_INET and twin.type == socket.SOCK_STREAM
                if is_tcp and port in (twin.getsockname()[1], twin.getpeername()[1]):
                    found.append(bool(twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
    return found


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("rows", [[4, 5, 6, 7, 8], [5, 6], [0], [0, 2], [2, 3, 4], [8, 3, 3, 0]], ids=str)
def test_large_columns(keepers: list[Keeper], rows: list[int], near: bool) -> None:
    """Rows of one keeper, one behind the other, are mapped; whoever writes to them changes nobody else's."""
    one, wanted = reader(near), np.array(rows)
    blocks = [keeper.block for keeper in keepers]
    for _ in range(2):
        column = one.column("large", blocks, wanted)
        assert isinstance(column, torch.Tensor)
        assert torch.equal(column, WHOLE["large"][rows])
        column.zero_()
    assert one.received_bytes == 2 * len(set(rows)) * MAPPED_BYTES
    is_mapped = near and rows in ([4, 5, 6, 7, 8], [5, 6], [0])
    whole_file = SIZES[0 if rows == [0] else 2] * MAPPED_BYTES
    assert (column.untyped_storage().nbytes() == whole_file) == (is_mapped or (not near and len(rows) == 5))


@pytest.mark.parametrize("drops", [True, False])
def test_mapped_rows_outlive_those_who_made_them(drops: bool) -> None:
    keeper = Keeper(0, 3)
    column = reader(near=True).column("large", [keeper.block], np.arange(1, 3))
    if drops:
        keeper.order("drop")
        keeper.order("again")  # other rows, perhaps in a file with the same number
        with pytest.raises(TransferError, match=r"rows 7 of process .* were dropped"):
            reader(near=True).column("large", [keeper.block], np.arange(1, 3))
    keeper.process.kill()
    keeper.process.join()
    assert isinstance(column, torch.Tensor)
    assert torch.equal(column, WHOLE["large"][1:3])
    with pytest.raises(
        TransferError, match=f"'large' cannot be fetched from process {keeper.process.pid} of"
    ):
        reader(near=True).column("large", [keeper.block], np.arange(1, 3))


def test_files_of_dropped_rows_are_closed() -> None:
    store = RowStore("127.0.0.1", SECRET)
    before = len(os.listdir("/proc/self/fd"))
    stored = store.keep(1, batch_of(0, 2))
    assert len(os.listdir("/proc/self/fd")) > before
    assert stored.columns["large"].values.descriptor is not None
    assert stored.columns["numbers"].values.descriptor is None
    store.drop([1])
    assert len(os.listdir("/proc/self/fd")) == before
    store.close()


def test_rows_that_are_kept_for_long_and_new_ones_have_places_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_store, "NUM_SLOTS", 2)
    store = RowStore("127.0.0.1", SECRET)
    kept = {key: store.keep(key, batch_of(0, 2)) for key in (1, 3)}
    with pytest.raises(StorageError, match="2 batches of rows are kept on this rank, and no more can be"):
        store.keep(5, batch_of(0, 2))
    seen = {key: ctypes.c_int64.from_address(stored.key_address) for key, stored in kept.items()}
    assert {key: word.value for key, word in seen.items()} == {1: 1, 3: 3}
    store.drop([1])
    assert {key: word.value for key, word in seen.items()} == {1: -1, 3: 3}
    assert store.keep(5, batch_of(0, 2)).key_address == kept[1].key_address
    store.close()


def test_own_rows_are_read_and_not_received() -> None:
    store = RowStore("127.0.0.1", SECRET)
    one = RowReader(SECRET, 5.0)
    block = Block(0, store.keep(1, batch_of(0, 4)))
    assert torch.equal(one.column("numbers", [block], np.arange(4)), torch.arange(4))
    assert one.received_bytes == 0
    store.close()


@pytest.mark.parametrize("near", [True, False])
def test_rows_that_were_dropped_are_not_read(near: bool) -> None:
    keeper = Keeper(0, 3)
    assert keeper.order("nothing") > 0
    assert keeper.order("drop") == 0
    with pytest.raises(TransferError, match=r"rows 7 of process .* were dropped"):
        reader(near).column("numbers", [keeper.block], np.array([0]))
    assert keeper.order("again") > 0
    with pytest.raises(TransferError, match=r"rows 7 of process .* were dropped"):
        reader(near).column("wide", [keeper.block], np.array([0]))
    keeper.end()


@pytest.mark.parametrize("near", [True, False])
def test_a_process_that_has_ended_is_named(near: bool) -> None:
    keeper = Keeper(0, 3)
    one = reader(near)
    one.column("numbers", [keeper.block], np.array([0]))
    keeper.process.kill()
    keeper.process.join()
    with pytest.raises(
        TransferError, match=f"column 'wide' cannot be fetched from process {keeper.process.pid} of"
    ):
        one.column("wide", [keeper.block], np.array([0]))


def test_a_reader_without_the_secret_gets_nothing(keepers: list[Keeper]) -> None:
    with pytest.raises(TransferError, match="AuthenticationError"):
        reader(near=False, secret=b"another").column("numbers", [keepers[0].block], np.array([0]))


def test_a_process_that_stops_answering_ends_the_wait(keepers: list[Keeper]) -> None:
    keeper, one = Keeper(0, 3), RowReader(SECRET, timeout_s=0.5)
    one._own_host = "another machine"
    one.column("numbers", [keeper.block], np.array([0]))
    assert keeper.process.pid is not None
    os.kill(keeper.process.pid, signal.SIGSTOP)
    threads = Path(f"/proc/{keeper.process.pid}/task")
    deadline = time.monotonic() + 10
    while any(file.read_text().rsplit(")", 1)[1].split()[0] != "T" for file in threads.glob("*/stat")):
        assert time.monotonic() < deadline, "one thread takes the signal, and stops the others by and by"
        time.sleep(0.01)
    begin = time.monotonic()
    with pytest.raises(TransferError, match="has ended or does not answer"):
        one.column("wide", [keeper.block], np.array([0]))
    assert time.monotonic() - begin < 5
    keeper.process.kill()


def test_ranks_must_give_rows_of_one_shape(keepers: list[Keeper]) -> None:
    stored = keepers[1].stored
    column = stored.columns["wide"]
    odd = replace(column, values=replace(column.values, entry_shape=(3, 2)))
    blocks = [keepers[0].block, Block(3, replace(stored, columns=stored.columns | {"wide": odd}))]
    with pytest.raises(
        TransferError, match=r"'wide' is torch\.float32\[2, 3\] on one rank and .*\[3, 2\] on another"
    ):
        reader(near=True).column("wide", blocks, np.arange(4))
