"""Weights that ranks read from each other's memory: who may, what arrives, and what happens when somebody stops."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridengine.runtime import neighbours
from hybridengine.runtime.neighbours import Neighbours
from hybridengine.runtime.peer_memory import DONE, OFFER, PeerMemoryTransport, make_transport
from hybridengine.runtime.transport import Messages, PeerError, PointToPointTransport
from tests.gloo.ranks import RankLauncher

TIMEOUT_S = 3.0
SIZES = (1, 7, 5000, 1 << 16)
"""Elements of the messages between any two ranks."""


def new_group() -> dist.ProcessGroup:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    return group


def exchange_of(
    transport: PointToPointTransport, rank: int, world_size: int
) -> tuple[Messages, list[torch.Tensor]]:
    """Messages of several sizes from each rank to each other, and what this rank must receive, in order."""
    others = [other for other in range(world_size) if other != rank]
    sends = [(other, values(rank, other, size)) for other in others for size in SIZES]
    receives = [(other, torch.zeros(size)) for other in others for size in SIZES]
    expected = [values(other, rank, size) for other in others for size in SIZES]
    return transport.prepare(sends, receives), expected


def values(sender: int, receiver: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + 1 + 100_000 * (10 * sender + receiver)


def received(messages: Messages) -> list[torch.Tensor]:
    return [tensor for _, tensor in messages.receives]


def arrive(rank: int, strangers: list[tuple[int, int]], waits_late: bool) -> tuple[list[int], bool, int, int]:
    """Exchanges twice, two at a time, where pairs (reader, owner) of `strangers` cannot read.

    (neighbours, all arrived, bytes that a wait reported, bytes counted)
    """
    can_read = Neighbours._can_read

    def refuse(self: Neighbours, other: int, *cards: object) -> bool:
        return (rank, other) not in strangers and can_read(self, other, *cards)  # type: ignore[arg-type]

    with mock.patch.object(Neighbours, "_can_read", refuse):
        transport = make_transport(new_group())
    assert isinstance(transport, PeerMemoryTransport)
    reported, right = 0, True
    first, second = (exchange_of(transport, rank, 3) for _ in range(2))
    for _ in range(2):
        for tensor in received(first[0]) + received(second[0]):
            tensor.zero_()
        dist.barrier()
        earlier = transport.post(first[0])
        if waits_late:  # as with a bucket in two steps: the second step is posted late and waited for early
            transport.post(second[0]).wait()
            reported = earlier.wait()
        else:
            later = transport.post(second[0])
            reported = earlier.wait()
            later.wait()
        for messages, expected in (first, second):
            right &= all(torch.equal(a, b) for a, b in zip(received(messages), expected, strict=True))
    return sorted(transport.neighbours.ranks), right, reported, transport.received_bytes


@pytest.mark.parametrize(
    ("strangers", "neighbours_of"),
    [
        ([], {0: [1, 2], 1: [0, 2], 2: [0, 1]}),
        ([(0, 1)], {0: [2], 1: [2], 2: [0, 1]}),  # one that cannot read is enough for messages both ways
        ([(0, 1), (0, 2), (2, 1)], {0: [], 1: [], 2: []}),
    ],
)
@pytest.mark.parametrize("waits_late", [False, True])
def test_everything_arrives_from_memory_and_by_messages(
    run_ranks: RankLauncher,
    strangers: list[tuple[int, int]],
    neighbours_of: dict[int, list[int]],
    waits_late: bool,
) -> None:
    size = 4 * 2 * sum(SIZES)
    for rank, found in enumerate(run_ranks(3, arrive, strangers, waits_late)):
        assert found == (neighbours_of[rank], True, size, 4 * size)


def test_one_rank_and_other_backends_need_no_memory(run_ranks: RankLauncher) -> None:
    assert run_ranks(1, kind_of_transport) == [PointToPointTransport]


def kind_of_transport(rank: int) -> type[PointToPointTransport]:
    return type(make_transport(new_group()))


def lose_the_owner(rank: int, how: str) -> tuple[str, float]:
    """Rank 0 lends to rank 1, and does not go on as it should; the error of rank 1, and how long it took."""
    transport = PeerMemoryTransport(new_group())
    weights = torch.ones(1 << 16)
    sends, receives = ([(1, weights)], []) if rank == 0 else ([], [(0, weights)])
    messages = transport.prepare(sends, receives)
    dist.barrier()
    started = time.monotonic()
    if rank == 0:
        if how == "dies before":
            os._exit(1)
        if how == "hangs":
            time.sleep(2 * TIMEOUT_S)
            return "", 0.0
        pending = transport.post(messages)
        if how == "dies after":
            os._exit(1)
        if how == "gives up":
            pending.abandon()
            transport.give_up()
        if how == "overwrites":  # gives up, and its connections are still open
            transport.epoch += 1
            weights.zero_()
        time.sleep(2)
        return "", 0.0
    if how != "dies before":
        time.sleep(1)
    try:
        transport.post(messages).wait()
    except PeerError as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("dies before", ("closed the connection", "cannot be heard")),
        ("dies after", ("cannot be read: No such process", "cannot be heard", "closed the connection")),
        ("hangs", (f"has not answered for {TIMEOUT_S:g} s",)),
        ("gives up", ("has given up what it had offered", "closed the connection", "cannot be told")),
        ("overwrites", ("has given up what it had offered",)),
    ],
)
def test_a_reader_ends_with_an_error_that_names_the_owner(
    run_ranks: RankLauncher, how: str, said: tuple[str, ...]
) -> None:
    _, (error, seconds) = run_ranks(2, lose_the_owner, how, may_die=[0])
    assert error.startswith("messages with ranks [0] failed: ")
    assert any(part in error for part in said), error
    assert seconds < 2 * TIMEOUT_S + 1


def lose_the_reader(rank: int) -> str:
    transport = PeerMemoryTransport(new_group())
    weights = torch.ones(8)
    messages = transport.prepare(*(([(1, weights)], []) if rank == 0 else ([], [(0, weights)])))
    dist.barrier()
    if rank == 1:
        os._exit(1)
    try:
        transport.post(messages).wait()
    except PeerError as error:
        return str(error)
    return ""


def test_an_owner_does_not_wait_for_a_dead_reader(run_ranks: RankLauncher) -> None:
    error, _ = run_ranks(2, lose_the_reader, may_die=[1])
    assert error.startswith("messages with ranks [1] failed: ")


def use_after_failure(rank: int) -> str:
    transport = PeerMemoryTransport(new_group())
    weights = torch.ones(8)
    messages = transport.prepare(*(([(1, weights)], []) if rank == 0 else ([], [(0, weights)])))
    pending = transport.post(messages)
    dist.barrier()
    pending.abandon()
    transport.give_up()
    dist.barrier()
    try:
        transport.post(messages).wait()
    except PeerError as error:
        return str(error)
    return ""


def test_after_a_failure_the_engine_is_made_anew(run_ranks: RankLauncher) -> None:
    for error in run_ranks(2, use_after_failure):
        assert (
            "connections were closed when a switch had failed; make the engine anew, on a process group of its own"
            in error
        )


def notes_out_of_order(rank: int) -> list[bytes]:
    near = Neighbours(new_group(), TIMEOUT_S)
    other = 1 - rank
    for about, number, content in (
        (OFFER, 1, b"first"),
        (DONE, 1, b""),
        (OFFER, 2, b"second"),
        (DONE, 2, b"last"),
    ):
        near.tell(other, about, number, content)
    return [near.hear(other, *note) for note in ((DONE, 2), (OFFER, 2), (OFFER, 1), (DONE, 1))]


def test_notes_overtake_each_other(run_ranks: RankLauncher) -> None:
    for heard in run_ranks(2, notes_out_of_order):
        assert heard == [b"last", b"second", b"first", b""]


def stranger_knocks(rank: int) -> list[int]:
    """A process that does not know the token connects before the neighbour does."""
    connect = Neighbours._connect

    def knock_first(self: Neighbours, other: int, card: neighbours._Card) -> None:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(card.path)
        stranger.send(f"{rank} {card.token ^ 1}".encode())
        connect(self, other, card)

    with mock.patch.object(Neighbours, "_connect", knock_first):
        near = Neighbours(new_group(), TIMEOUT_S)
    near.tell(1 - rank, OFFER, 1, b"hello")
    assert near.hear(1 - rank, OFFER, 1) == b"hello"
    return sorted(near.ranks)


def test_a_stranger_is_not_taken_for_a_neighbour(run_ranks: RankLauncher) -> None:
    assert run_ranks(2, stranger_knocks) == [[1], [0]]


@pytest.mark.parametrize("length", [1, 120], ids=["short name", "longer than that of a socket may be"])
def test_nothing_is_left_in_the_temporary_folder(
    run_ranks: RankLauncher, tmp_path: Path, length: int
) -> None:
    folder = tmp_path / ("d" * length)
    folder.mkdir()
    assert run_ranks(2, left_behind, str(folder)) == [[], []]


def left_behind(rank: int, folder: str) -> list[str]:
    with mock.patch("tempfile.tempdir", folder):
        near = Neighbours(new_group(), TIMEOUT_S)
    dist.barrier()
    assert len(near.ranks) == 1
    return os.listdir(folder)
