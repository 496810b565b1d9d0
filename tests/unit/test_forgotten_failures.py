"""Failures of calls whose results nobody has fetched: each is raised once, by a later call on the pool."""

from __future__ import annotations

import pytest

from hybridengine.controller.failures import RankFailure, rank_failed
from hybridengine.controller.futures import Future
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.waiting import Operation
from hybridengine.errors import WorkerError


class Failed(Operation):
    """An operation that has ended with a failure on rank 0."""

    def __init__(self, role: str) -> None:
        super().__init__(role, "fail", {}, ["here"], timeout_s=1.0)
        self._failures = [RankFailure(0, "ValueError: bad luck", role=role, method="fail", place="here")]


def test_two_calls_that_have_failed_are_told_one_after_the_other() -> None:
    pool = ResourcePool([1])
    for role in ("first", "second"):
        pool._unfinished.append(Future(Failed(role), {}, list, lambda: pool._unfinished))
    told = []
    for _ in range(2):
        with pytest.raises(WorkerError) as caught:
            pool.raise_failures()
        told.append(str(caught.value))
    assert told == [str(rank_failed(Failed(role).failures[0], [])) for role in ("first", "second")]
    pool.raise_failures()
