"""Waiting for ranks: the first failure ends the wait, and no wait is without an end."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError

from hybridengine.controller.exchange import CallRecord
from hybridengine.controller.failures import Outcome, RankFailure, locate, rank_failed, root_cause
from hybridengine.errors import WorkerTimeoutError

ECHO_GRACE_S = 5.0
"""How long to look for the rank that caused a failed collective before blaming one that only saw it fail."""


class Operation:
    """One operation on some ranks, and their outcomes as they arrive."""

    _numbers = itertools.count()

    def __init__(
        self, role: str, method: str, outcomes: Mapping[int, ObjectRef], places: Sequence[str], pool: str = ""
    ) -> None:
        """`outcomes` are references to an `Outcome` per rank; `places[rank]` says where a rank is."""
        self.number = next(self._numbers)
        self.pool = pool
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
            self.pool,
        )

    def poll(self) -> bool:
        """Take what has arrived; whether all ranks have answered."""
        self._take(timeout_s=0.0)
        return not self._pending

    def wait(self, timeout_s: float, blocked_by: Callable[[int], str | None] = lambda rank: None) -> None:
        """Wait until every rank has answered, or one has failed.

        `blocked_by(rank)` names an earlier operation that the rank has not ended, for the message.

        Raises:
            RankFailedError: a rank raised or died; raised at once, also while other ranks hang.
            WorkerTimeoutError: ranks are missing after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while self._pending and not self._failures:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise WorkerTimeoutError(self._hang(timeout_s, blocked_by))
            self._take(remaining)
        if self._failures:
            self._look_for_cause()
            cause, others = root_cause(self._failures)
            raise rank_failed(cause, others)

    def _take(self, timeout_s: float) -> None:
        if not self._pending:
            return
        ranks = {ref: rank for rank, ref in self._pending.items()}
        ready, _ = ray.wait(list(ranks), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=0)
        for ref in ready:
            rank = ranks[ref]
            del self._pending[rank]
            outcome = _outcome_of(rank, ref)
            self._outcomes[rank] = outcome
            if outcome.failure is not None:
                self._failures.append(locate(outcome.failure, self.role, self.method, self._places[rank]))

    def _look_for_cause(self) -> None:
        """Where all failures so far are echoes of a lost peer, give the peer's own failure time to arrive."""
        deadline = time.monotonic() + ECHO_GRACE_S
        while self._pending and all(failure.in_collective for failure in self._failures):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._take(remaining)

    def _hang(self, timeout_s: float, blocked_by: Callable[[int], str | None]) -> str:
        lines = []
        for rank in self.missing:
            earlier = blocked_by(rank)
            still = f", still in {earlier}" if earlier not in (None, str(self)) else ""
            lines.append(f"  rank {rank} ({self._places[rank]}){still}")
        return (
            f"{self} did not end within {timeout_s:g} s: {len(lines)} of {len(lines) + len(self._outcomes)}"
            " ranks have not answered; see their stacks in the log, or raise timeout_s\n" + "\n".join(lines)
        )


def _outcome_of(rank: int, ref: ObjectRef) -> Outcome:
    try:
        return ray.get(ref)
    except RayError as error:  # the process died, or Ray could not carry arguments or result
        died = isinstance(error, RayActorError)
        text = " ".join(str(error).split())
        now = time.time()
        return Outcome(rank, now, now, RankFailure(rank, f"{type(error).__name__}: {text}", died=died))
