"""Ranks that wait for each other at the end of a switch: none leaves before all have arrived."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from typing import cast

import pytest
import torch.distributed as dist

from hybridengine.weights.transport import PeerError, PointToPointTransport
from tests.gloo.ranks import RankLauncher

TIMEOUT_S = 3.0


def make_transport(ranks: tuple[int, ...]) -> PointToPointTransport:
    group = cast(dist.ProcessGroup, dist.new_group(sorted(ranks), timeout=timedelta(seconds=TIMEOUT_S)))
    return PointToPointTransport(group) if dist.get_rank() in ranks else None  # type: ignore[return-value]


def meet(rank: int, ranks: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return (arrival time, departure time) of the rank at several meetings of `ranks`, on one clock."""
    transport, chance = make_transport(ranks), random.Random(rank)
    times = []
    for _ in range(5 if rank in ranks else 0):
        time.sleep(chance.choice([0.0, 0.03, 0.06]))
        come = time.monotonic()
        transport.meet()
        times.append((come, time.monotonic()))
    return times


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3, 4), tuple(range(8)), (1, 3, 4)], ids=str)
def test_nobody_leaves_before_everybody_has_come(run_ranks: RankLauncher, ranks: tuple[int, ...]) -> None:
    times = run_ranks(max(ranks) + 1, meet, ranks)
    meetings = list(zip(*(times[rank] for rank in ranks), strict=True))
    assert len(meetings) == 5
    for meeting in meetings:
        assert max(come for come, _ in meeting) <= min(left for _, left in meeting)


def miss(rank: int, missing: int, dies: bool) -> tuple[int, ...]:
    """Meet once with a rank that does not come again; return the ranks that the others then waited for."""
    transport = make_transport(tuple(range(dist.get_world_size())))
    transport.meet()
    dist.barrier()
    if rank == missing and dies:
        os._exit(1)
    if rank == missing:
        transport.give_up()
        return ()
    try:
        transport.meet()
    except PeerError as error:
        transport.give_up()
        return error.peers
    return ()


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "gives up"])
def test_who_waits_for_a_missing_rank_ends(run_ranks: RankLauncher, dies: bool) -> None:
    waited_for = run_ranks(5, miss, 3, dies, may_die=[3])
    assert all(3 in waited_for[rank] for rank in (0, 1, 2, 4))
