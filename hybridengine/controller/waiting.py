"""Waiting for ranks: the first failure ends the wait, and no wait is without an end."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError

from hybridengine.controller.exchange import CallRecord, row_exchange
from hybridengine.controller.failures import Outcome, RankFailure, rank_failed, root_cause
from hybridengine.controller.whereabouts import report_lines, words_of
from hybridengine.errors import WorkerError, WorkerTimeoutError

ECHO_GRACE_S = 5.0
"""How long to look for the call and the rank that failed first before blaming those that only saw it."""


class Operation:
    """One operation on some ranks, and their outcomes as they arrive."""

    _numbers = itertools.count()

    def __init__(
        self,
        role: str,
        method: str,
        outcomes: Mapping[int, ObjectRef],
        places: Sequence[str],
        timeout_s: float,
        pool: str = "",
    ) -> None:
        """`outcomes` are references to an `Outcome` per rank; `places[rank]` says where a rank is."""
        self.number = next(self._numbers)
        self.pool = pool
        self.timeout_s = timeout_s
        self.role = role
        self.method = method
        self._places = places
        self._pending = dict(outcomes)
        self._outcomes: dict[int, Outcome] = {}
        self._failures: list[RankFailure] = []

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not answered."""
        return tuple(sorted(self._pending))

    @property
    def failed(self) -> bool:
        return bool(self._failures)

    @property
    def seconds(self) -> float:
        """Time inside the method, of the slowest rank that has answered."""
        return max((outcome.seconds for outcome in self._outcomes.values()), default=0.0)

    @property
    def record(self) -> CallRecord:
        """What the call took, of the ranks that have answered."""
        transferred: Counter[str] = Counter()
        for outcome in self._outcomes.values():
            transferred.update(outcome.transferred)
        return CallRecord(
            self.role,
            self.method,
            {rank: (outcome.begin, outcome.end) for rank, outcome in sorted(self._outcomes.items())},
            {rank: outcome.fetch_seconds for rank, outcome in sorted(self._outcomes.items())},
            transferred,
            {rank: outcome.held_bytes for rank, outcome in sorted(self._outcomes.items())},
            self.pool,
        )

    @property
    def failures(self) -> tuple[RankFailure, ...]:
        """Of the ranks that have answered."""
        return tuple(self._failures)

    @property
    def pending(self) -> dict[int, ObjectRef]:
        """Rank -> reference to its outcome, where that has not arrived."""
        return dict(self._pending)

    def ended_well(self, timeout_s: float) -> set[int]:
        """Ranks that have ended without a failure, all of them or those that have within so long."""
        deadline = time.monotonic() + timeout_s
        while not self.poll() and (left_s := deadline - time.monotonic()) > 0:
            ray.wait(list(self._pending.values()), num_returns=len(self._pending), timeout=left_s)
        return {rank for rank, outcome in self._outcomes.items() if outcome.failure is None}

    def error(self) -> WorkerError:
        """What to raise for its failures."""
        return rank_failed(*root_cause(self._failures))

    def poll(self) -> bool:
        """Take what has arrived; whether all ranks have answered."""
        if self._pending:
            self._take()
        return not self._pending

    def wait(self) -> None:
        """Wait until every rank has answered, or one has failed.

        Raises:
            RankFailedError: a rank raised or died; raised at once, also while other ranks hang.
            WorkerTimeoutError: ranks are missing after `timeout_s`.
        """
        if wait_for(self):
            raise self.error()

    def hang(self, timeout_s: float, blocked_by: Callable[[int], str | None]) -> WorkerTimeoutError:
        """What to raise where ranks have not answered in time; `blocked_by` as for `wait_for`."""
        places = dict[int, str]()
        for rank in self.missing:
            earlier = blocked_by(rank)
            still = f", still in {earlier}" if earlier not in (None, str(self)) else ""
            places[rank] = f"{self._places[rank]}{still}"
        # Before the call's own limit, ranks have said nothing yet.
        words = words_of(self._pending) if timeout_s >= self.timeout_s else {}
        return WorkerTimeoutError(
            f"{self} did not end within {timeout_s:g} s: {len(places)} of {len(places) + len(self._outcomes)}"
            " ranks have not answered; see their stacks in the log, or raise the limit (of a run: timeouts.call_s)\n"
            + "\n".join(report_lines(places, words))
        )

    def _take(self) -> None:
        ranks = {ref: rank for rank, ref in self._pending.items()}
        ready, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=0)
        for ref in ready:
            rank = ranks[ref]
            del self._pending[rank]
            outcome = _outcome_of(rank, ref)
            self._outcomes[rank] = outcome
            row_exchange().payload_bytes += outcome.inline_bytes
            if outcome.failure is not None:
                place = self._places[rank]
                self._failures.append(
                    replace(outcome.failure, role=self.role, method=self.method, place=place)
                )


def wait_for(
    operation: Operation,
    ahead: Sequence[Operation] = (),
    total_s: float | None = None,
    blocked_by: Callable[[int], str | None] = lambda rank: None,
) -> Operation | None:
    """Wait until every rank has ended `operation`, or it or one of `ahead` has failed.

    Args:
        ahead: what must end first, oldest first: earlier operations on the same ranks, and those that make its rows. A
            failure there is seen at once, however long others take.
        total_s: longest wait. By default each operation has its own limit, from when it is the oldest that has not ended.
        blocked_by: name of an earlier operation that a rank has not ended, for the message.

    Returns:
        The operation that has failed; None where all ranks have ended `operation` well.

    Raises:
        WorkerTimeoutError: ranks are missing at the end of the limit.
    """
    operations = [*ahead, operation]
    end = None if total_s is None else time.monotonic() + total_s
    oldest, deadline = None, math.inf
    while True:
        pending = [one for one in operations if not one.poll()]
        if operation not in pending and not operation.failed:
            return None
        if any(one.failed for one in operations):
            return _first_failed(operations)
        if pending[0] is not oldest:
            oldest, deadline = pending[0], time.monotonic() + pending[0].timeout_s
        remaining = (deadline if end is None else end) - time.monotonic()
        if remaining <= 0:
            if total_s is not None:
                raise operation.hang(total_s, blocked_by)
            raise pending[0].hang(pending[0].timeout_s, blocked_by)
        ray.wait([ref for one in pending for ref in one.pending.values()], num_returns=1, timeout=remaining)


def _first_failed(operations: Sequence[Operation]) -> Operation:
    """The operation whose failure caused those of the others; it may still be on its way."""
    deadline = time.monotonic() + ECHO_GRACE_S
    while True:
        failed = [one for one in operations if one.failed]
        expected = _expected_causes(operations, failed)
        remaining = deadline - time.monotonic()
        if not expected or remaining <= 0:
            return min(failed, key=lambda one: (all(map(_is_echo, one.failures)), one.number))
        ray.wait(expected, num_returns=1, timeout=remaining)
        for one in operations:
            one.poll()


def _expected_causes(operations: Sequence[Operation], failed: Sequence[Operation]) -> list[ObjectRef]:
    """Outcomes that have not arrived and may say what caused the failures so far."""
    if all(_is_echo(failure) for one in failed for failure in one.failures):
        return [ref for one in operations for ref in one.pending.values()]
    # A rank ends its operations in order: what it died in is the first that it has not ended.
    died = {(one.pool, failure.rank) for one in failed for failure in one.failures if failure.died}
    return [
        ref
        for one in operations
        if one.number < max(other.number for other in failed)
        for rank, ref in one.pending.items()
        if (one.pool, rank) in died
    ]


def _is_echo(failure: RankFailure) -> bool:
    return failure.in_collective or failure.lacks_input


def _outcome_of(rank: int, ref: ObjectRef) -> Outcome:
    try:
        return ray.get(ref)
    except RayError as error:  # the process died, or Ray could not carry arguments or result
        died = isinstance(error, RayActorError)
        text = " ".join(str(error).split())
        now = time.time()
        return Outcome(rank, now, now, RankFailure(rank, f"{type(error).__name__}: {text}", died=died))
