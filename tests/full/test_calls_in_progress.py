"""Calls in progress as the live view sees them, on a real Ray cluster."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from hybridengine.controller.call_log import call_log
from hybridengine.controller.calls import Future
from hybridengine.controller.failures import RankFailedError
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.rows import Rows
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.report.live import LiveView
from tests.full.probe_workers import ProbeWorker

LIMIT_S = 20.0


@pytest.fixture
def view() -> LiveView:
    calls = call_log()
    return LiveView(Console(file=io.StringIO()), 1, lambda role, method: method, lambda: calls.unfinished)


def _wait_for(view: LiveView, role: str, note: str) -> None:
    """Wait until a role's row reads `note`; the controller itself waits for nothing meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        list(view.get_renderables())
        if role in view._roles and view._roles[role].fields["note"] == note:
            return
        time.sleep(0.02)
    raise AssertionError(f"{role} never read {note!r}: {view._roles}")


def test_ranks_are_seen_to_end_though_nobody_waits_for_them(
    actor: WorkerGroup, critic: WorkerGroup, view: LiveView, num_called: int
) -> None:
    actor.sleep(2, 3.0)  # the other three ranks return at once
    rows = critic.doubled(actor.numbers(Rows.numbered(8)))
    num_ended = 3 if num_called > 4 else 2  # a relay answers for its two ranks together
    _wait_for(view, "actor", f"sleep, {num_ended}/4 ranks done")
    _wait_for(view, "critic", "waits: doubled")  # for rows of rank 2
    _wait_for(view, "actor", "")
    _wait_for(view, "critic", "")
    assert rows.get("doubled")["doubled"].tolist() == [2 * row for row in range(8)]


def test_a_rank_that_dies_has_ended_its_call(ray_cluster: int, view: LiveView) -> None:
    with ResourcePool([2], timeout_s=30) as pool:
        group = WorkerGroup(pool, ProbeWorker, role="mortal", parallel="1-1-2")
        future = group.die_before_collective(1)
        _wait_for(view, "mortal", "")
        with pytest.raises(RankFailedError):
            future.get()


def test_threads_that_look_at_the_same_calls_count_each_once(actor: WorkerGroup) -> None:
    """Groups are started side by side, and each start looks at the calls that others wait for."""
    log = call_log()
    log.take_records()
    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            calls = [actor.tp_sum(1.0) for _ in range(5)]
            for waiting in [threads.submit(_wait_until_ended, calls) for _ in range(8)]:
                waiting.result()
            assert [str(record) for record in log.take_records()] == ["actor.tp_sum"] * 5
            assert not log.unfinished


def _wait_until_ended(calls: Sequence[Future]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not all(call.poll() for call in calls):
        assert time.monotonic() < deadline
