"""Ranks that wait for each other at the end of a switch: nobody leaves before everybody has come."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from hybridengine.runtime.neighbours import Neighbours
from hybridengine.runtime.peer_memory import PeerMemoryTransport
from hybridengine.runtime.transport import PeerError, PointToPointTransport
from tests.gloo.ranks import RankLauncher

TIMEOUT_S = 3.0
TRANSPORTS = ["messages", "memory", "both"]


def transport_of(rank: int, kind: str) -> PointToPointTransport:
    """With `both`, ranks 0 and 1 cannot read each other's memory."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    assert isinstance(group, dist.ProcessGroup)
    if kind == "messages":
        return PointToPointTransport(group)
    can_read = Neighbours._can_read

    def refuse(self: Neighbours, other: int, *cards: object) -> bool:
        return (kind == "memory" or {rank, other} != {0, 1}) and can_read(self, other, *cards)  # type: ignore[arg-type]

    with mock.patch.object(Neighbours, "_can_read", refuse):
        return PeerMemoryTransport(group)


def meet(rank: int, kind: str, ranks: tuple[int, ...]) -> list[tuple[float, float]]:
    """(when the rank has come, when it has left) of several meetings of `ranks`, on one clock."""
    transport, chance = transport_of(rank, kind), random.Random(rank)
    times = []
    for _ in range(5 if rank in ranks else 0):
        time.sleep(chance.choice([0.0, 0.03, 0.06]))
        come = time.monotonic()
        transport.meet(ranks)
        times.append((come, time.monotonic()))
    return times


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("ranks", [(0, 1), (2, 1, 0), (0, 1, 2, 3, 4), tuple(range(8)), (1, 3, 4)], ids=str)
def test_nobody_leaves_before_everybody_has_come(
    run_ranks: RankLauncher, ranks: tuple[int, ...], kind: str
) -> None:
    times = run_ranks(max(ranks) + 1, meet, kind, ranks)
    meetings = list(zip(*(times[rank] for rank in ranks), strict=True))
    assert len(meetings) == 5
    for meeting in meetings:
        assert max(come for come, _ in meeting) <= min(left for _, left in meeting)


def miss(rank: int, kind: str, missing: int, dies: bool) -> tuple[int, ...]:
    """A rank meets once and does not come again; whom another then waited for."""
    transport, ranks = transport_of(rank, kind), tuple(range(dist.get_world_size()))
    transport.meet(ranks)
    dist.barrier()
    if rank == missing and dies:
        os._exit(1)
    if rank == missing:
        transport.give_up()
        return ()
    try:
        transport.meet(ranks)
    except PeerError as error:
        transport.give_up()
        return error.peers
    return ()


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("dies", [True, False], ids=["dies", "gives up"])
def test_who_waits_for_a_missing_rank_ends(run_ranks: RankLauncher, kind: str, dies: bool) -> None:
    waited_for = run_ranks(5, miss, kind, 3, dies, may_die=[3], timeout_s=60)
    assert all(waited_for[rank] for rank in (0, 1, 2, 4))
    assert any(3 in peers for peers in waited_for if peers)
