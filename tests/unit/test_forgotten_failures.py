"""Failures of calls whose results nobody has fetched: each is raised once, by a later call on the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ray

from hybridengine.controller.call_log import CallLog, call_log
from hybridengine.controller.calls import Future, wait_any
from hybridengine.controller.failures import RankFailure, rank_failed
from hybridengine.controller.pool import ResourcePool
from hybridengine.errors import WorkerError, WorkerTimeoutError


def failed(pool: ResourcePool, role: str, inputs: tuple[Future, ...] = ()) -> Future:
    """Return a call that has ended with a failure on rank 0."""
    call = Future(pool, role, "fail", {}, places=["here"], timeout_s=1.0, inputs=inputs)
    why = RankFailure(0, "ValueError: bad luck", role=role, method="fail", place="here")
    call.failures.append(replace(why, lacks_input=bool(inputs)))
    return call


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> CallLog:
    log = call_log()
    monkeypatch.setattr(log, "unfinished", [])
    return log


def unfinished(log: CallLog, monkeypatch: pytest.MonkeyPatch, pool: ResourcePool, method: str) -> Future:
    """Return a call that no rank has answered."""
    call = Future(
        pool, "role", method, {ray.ObjectRef.nil(): [0]}, places=[f"pool {pool.name}"], timeout_s=60.0
    )
    monkeypatch.setattr(call, "poll", lambda: not call.missing)
    log.unfinished.append(call)
    return call


def test_a_hung_call_is_named_although_others_end(log: CallLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that hangs would otherwise go unnoticed among many that end one call after another."""
    monkeypatch.setattr("hybridengine.controller.calls.words_of", lambda pending: {})
    hung = unfinished(log, monkeypatch, ResourcePool([1], name="engines.1"), "advance")
    ended = Future(ResourcePool([1]), "role", "advance", {}, places=[], timeout_s=60.0)
    wait_any([ended, hung])
    hung.running_s -= 60
    with pytest.raises(
        WorkerTimeoutError, match=r"role\.advance did not end within 60 s.*\n.*pool engines\.1"
    ):
        wait_any([ended, hung])


def test_the_limit_of_a_call_does_not_count_those_before_it(
    log: CallLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wait_any` names the call that runs, not one that has waited for it for as long."""
    monkeypatch.setattr("hybridengine.controller.calls.words_of", lambda pending: {})
    pool, ended = ResourcePool([1]), Future(ResourcePool([1]), "role", "x", {}, places=[], timeout_s=60.0)
    first, second = (unfinished(log, monkeypatch, pool, name) for name in ("log_probs", "update"))
    wait_any([second, ended])
    assert first.running_s < second.running_s
    second.submitted_s -= 100
    first._pending.clear()
    wait_any([second, ended])
    second.running_s -= 60
    with pytest.raises(WorkerTimeoutError, match=r"role\.update did not end within 60 s"):
        wait_any([second, ended])


def test_two_calls_that_have_failed_are_told_one_after_the_other(log: CallLog) -> None:
    pool = ResourcePool([1])
    calls = [failed(pool, role) for role in ("first", "second")]
    log.unfinished += calls
    told = []
    for _ in calls:
        with pytest.raises(WorkerError) as caught:
            pool.raise_failures()
        told.append(str(caught.value))
    assert told == [str(rank_failed(call.failures[0], [])) for call in calls]
    pool.raise_failures()
    assert not log.unfinished


def test_a_call_whose_rows_were_never_produced_says_why(log: CallLog) -> None:
    """The cause is passed on through calls of several pools, even if it was raised before; and it is not raised again."""
    pools = [ResourcePool([1]) for _ in range(3)]
    cause = failed(pools[0], "cause")
    log.unfinished.append(cause)
    with pytest.raises(WorkerError, match=r"cause\.fail failed on rank 0"):
        pools[0].raise_failures()
    pools[0].raise_failures()
    middle = failed(pools[1], "middle", (cause,))
    last = failed(pools[2], "last", (middle,))
    log.unfinished += [middle, last]
    with pytest.raises(WorkerError, match=r"cause\.fail failed on rank 0"):
        last.wait()
    for pool in pools:
        pool.raise_failures()
    assert not log.unfinished
