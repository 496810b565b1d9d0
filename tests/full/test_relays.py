"""Relays between the controller and ranks, on a real Ray cluster: their order, their failures, and those of ranks below
them. What groups do through relays is tested where it is tested without them (`num_called`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import ray

from hybridengine.controller import relays
from hybridengine.controller.call_log import call_log
from hybridengine.controller.failures import RankFailedError
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.rows import Rows
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.errors import WorkerTimeoutError
from tests.full.probe_workers import ProbeWorker, batch_of


@pytest.fixture(autouse=True)
def two_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "NUM_CALLED", 2)
    monkeypatch.setattr(relays, "FAN_OUT", 2)


@pytest.fixture
def mortal(ray_cluster: int) -> Iterator[WorkerGroup]:
    """Four ranks below two relays, which a test may end."""
    with ResourcePool([4], timeout_s=60) as pool:
        yield WorkerGroup(pool, ProbeWorker, role="mortal", parallel="1-1-4", timeout_s=60)
        pool.close()


def test_requests_overtake_each_other_and_ranks_do_not_see_it(mortal: WorkerGroup) -> None:
    """Ray begins the calls of an asynchronous actor in any order; here the second is sent first."""
    log, pool = call_log(), mortal.pool
    log.take_records()
    before = [branch.num_asked for branch in pool._branches]
    for branch in pool._branches:
        branch.num_asked += 1
    second = mortal.items(["a", "b", "c", "d"])
    for branch, number in zip(pool._branches, before, strict=True):
        branch.num_asked = number
    time.sleep(1.0)
    assert not second.done()
    first = mortal.sleep(0, 0.3)
    assert second.get() == ["a@0", "b@1", "c@2", "d@3"]
    assert first.get() == [None] * 4
    records = {record.method: record for record in log.take_records()}
    for rank in range(4):
        assert records["sleep"].spans[rank][1] <= records["items"].spans[rank][0]


def test_a_failure_below_a_relay_is_raised_while_its_peers_hang(mortal: WorkerGroup) -> None:
    begin = time.monotonic()
    future = mortal.fail_before_collective(1)  # rank 0, below the same relay, hangs
    with pytest.raises(
        RankFailedError, match=r"mortal\.fail_before_collective failed on rank 1 \(.*bad luck"
    ):
        future.get()
    assert time.monotonic() - begin < 30
    assert {0, 2, 3} >= set(future.missing) >= {0}


def test_a_rank_that_dies_below_a_relay_is_named(mortal: WorkerGroup) -> None:
    mortal.die_before_collective(3)
    with pytest.raises(RankFailedError, match=r"mortal\.die_before_collective died on rank 3") as caught:
        mortal.describe().get()
    assert caught.value.failure.died
    assert caught.value.failure.place.startswith("pp=0 dp=3 tp=0, node ")


def test_a_hang_names_the_ranks_below_a_relay_and_where_they_are(ray_cluster: int) -> None:
    with ResourcePool([4], timeout_s=60) as pool:
        group = WorkerGroup(pool, ProbeWorker, role="stuck", parallel="1-1-4", timeout_s=4)
        sleeping = group.sleep(2, 60.0)
        with pytest.raises(
            WorkerTimeoutError, match=r"stuck\.sleep did not end within 4 s: 1 of 4"
        ) as caught:
            group.describe().get()
        assert sleeping.missing == (2,), "its neighbour below the relay has answered"
        _, line = str(caught.value).splitlines()
        assert line.startswith("  rank 2 (pp=0 dp=2 tp=0, node ")
        assert "in sleep (tests/full/probe_workers.py:" in line
        pool.close()


def test_ranks_of_a_dead_relay_are_lost_by_name(mortal: WorkerGroup) -> None:
    relay = mortal.pool._branches[1].process
    rows = mortal.numbers(Rows.numbered(8)).wait()
    sleeping = mortal.sleep(2, 30.0)
    ray.kill(relay)
    with pytest.raises(
        RankFailedError, match=r"mortal\.sleep died on rank 2 .*relay of ranks 2 to 3 has failed"
    ) as caught:
        sleeping.get()
    assert caught.value.failure.died
    assert {0, 1} >= set(sleeping.missing)
    with pytest.raises(RankFailedError, match="relay of ranks 2 to 3 has failed"):
        mortal.doubled(rows).get()


def test_rows_of_a_rank_that_died_below_a_relay_are_an_input_that_others_lack(ray_cluster: int) -> None:
    with ResourcePool([4], timeout_s=60) as one, ResourcePool([2], timeout_s=60) as other:
        first = WorkerGroup(one, ProbeWorker, role="first", parallel="1-1-4")
        second = WorkerGroup(other, ProbeWorker, role="second", parallel="1-1-2")
        pid = first.describe().get()[3]["pid"]
        first.sleep(3, 1.0)
        rows = first.numbers(Rows.numbered(8))
        seen = second.doubled(rows)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailedError, match=r"first\.sleep died on rank 3"):
            seen.get()
        one.close()
        other.close()


def test_relays_below_relays_answer_as_one(ray_cluster: int) -> None:
    """Five ranks, two to a process: three relays over them, and two over these."""
    with ResourcePool([5], timeout_s=60) as pool, ResourcePool([3], timeout_s=60) as other:
        group = WorkerGroup(pool, ProbeWorker, role="deep", parallel="1-1-5")
        assert [branch.ranks for branch in pool._branches] == [range(4), range(4, 5)]
        assert [one.ranks for one in pool._branches[0].children] == [range(2), range(2, 4)]
        assert group.items(list("abcde")).get() == ["a@0", "b@1", "c@2", "d@3", "e@4"]
        rows = group.over_ranks(batch_of(12), "metres", factor=1)
        assert rows[[11, 0, 6]].get()["ranks"].tolist() == [4, 0, 2]
        again = WorkerGroup(other, ProbeWorker, role="other", parallel="1-1-3", config={"offset": 50})
        echo = again.over_dp(group.over_ranks(rows[::-1], "feet", factor=2)).get()
        assert echo["row_ids"].tolist() == [50 + 2 * row for row in range(12)][::-1]
        with pytest.raises(RankFailedError, match=r"deep\.fail failed on rank 3"):
            group.fail(3).get()
        sleeping = group.sleep(1, 3.0)
        with pytest.raises(WorkerTimeoutError, match=r"1 of 5 ranks have not answered.*\n  rank 1 "):
            sleeping.get(timeout_s=1.0)
        assert sleeping.get() == [None] * 5
