"""Calls as an observer sees them while they are under way, on a real Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hybridengine.controller.exchange import row_exchange
from hybridengine.controller.failures import RankFailedError
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.rows import Rows
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.metrics.call_progress import CallProgress, RoleProgress
from tests.full.probe_workers import ProbeWorker

LIMIT_S = 20.0


@pytest.fixture
def observer() -> Iterator[CallProgress]:
    progress = CallProgress()
    row_exchange().observer = progress
    yield progress
    row_exchange().observer = None


def _when(observer: CallProgress, role: str, *, num_busy: int, method: str | None) -> RoleProgress:
    """The role as soon as so many ranks are in the method; the controller itself waits for nothing meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for seen in observer.read():
            if (seen.role, seen.num_busy, seen.method) == (role, num_busy, method):
                return seen
        time.sleep(0.02)
    raise AssertionError(f"{role} never had {num_busy} ranks in {method}: {observer.read()}")


def test_ranks_are_seen_to_end_though_nobody_waits_for_them(
    actor: WorkerGroup, critic: WorkerGroup, observer: CallProgress
) -> None:
    actor.sleep(2, 3.0)  # the other three ranks return at once
    rows = critic.doubled(actor.numbers(Rows.numbered(8)))
    sleeping = _when(observer, "actor", num_busy=1, method="sleep")
    assert (sleeping.num_ranks, sleeping.num_done, sleeping.num_made) == (4, 0, 2)
    assert _when(observer, "critic", num_busy=0, method="doubled").num_made == 1, (
        "it waits for rows of rank 2"
    )
    assert _when(observer, "actor", num_busy=0, method=None).num_done == 2
    assert _when(observer, "critic", num_busy=0, method=None).num_done == 1
    assert rows.get("doubled")["doubled"].tolist() == [2 * row for row in range(8)]


def test_a_rank_that_dies_has_ended_its_call(ray_cluster: int, observer: CallProgress) -> None:
    with ResourcePool([2], timeout_s=30) as pool:
        group = WorkerGroup(pool, ProbeWorker, role="mortal", parallel="1-1-2")
        future = group.die_before_collective(1)
        ended = _when(observer, "mortal", num_busy=0, method=None)
        assert (ended.num_done, ended.num_made) == (2, 2), "the making of the workers counts"
        with pytest.raises(RankFailedError):
            future.get()
