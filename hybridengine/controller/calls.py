"""Calls on the ranks of a pool: time-limited waits that the first failure ends, results, and the log of all calls."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from threading import RLock
from typing import Any, NoReturn

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError

from hybridengine.controller.failures import Outcome, RankFailure, rank_failed, root_cause
from hybridengine.controller.row_requests import traffic_bytes
from hybridengine.controller.whereabouts import report_lines, words_of
from hybridengine.errors import WorkerError, WorkerTimeoutError, WrongArgumentsError

ECHO_GRACE_S = 5.0
"""Time to wait for the first failure before reporting one that may be its consequence."""


@dataclass(frozen=True)
class CallRecord:
    """Times and bytes of an ended call."""

    role: str
    method: str
    spans: dict[int, tuple[float, float]]
    """Rank -> start and end, in seconds since the epoch."""
    fetch_seconds: dict[int, float]
    """Rank -> seconds from the start of the call until its input rows were available."""
    transferred: Counter[str]
    """Bytes of rows read from other processes, over all ranks, by producing call."""
    held_bytes: dict[int, dict[str, int]]
    """Rank -> name -> bytes of memory held by its process at the end of the call."""
    pool: str = ""
    """Name of the ranks' pool, if the run has several."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"

    @property
    def seconds(self) -> float:
        """Duration on the slowest rank."""
        return max(end - begin for begin, end in self.spans.values())


class CallLog:
    """Calls of this process on all of its pools, which may exchange rows."""

    def __init__(self) -> None:
        self.lock = RLock()
        """Held while outcomes are processed; an observer may poll other calls."""
        self.payload_bytes = 0
        """Bytes of rows transferred through the controller: sent, fetched, or inside results and arguments."""
        self.records: list[CallRecord] = []
        """Records of calls that succeeded since the last `take_records`, in the order in which they ended."""
        self.observer: Callable[[CallRecord], None] | None = None
        """Gets each record in place of `records`, which nobody takes from a process that runs without steps."""
        self.unfinished: list[Future] = []
        """Calls in order of submission, without those known to have succeeded and those that all ranks have ended and
        whose failure was raised."""

    def count(self, payload_bytes: int) -> None:
        """Add to the bytes of rows transferred through the controller; safe in any thread."""
        with self.lock:
            self.payload_bytes += payload_bytes

    def add(self, call: Future) -> None:
        """Add a call that was submitted."""
        with self.lock:
            self.unfinished.append(call)

    def forget(self, calls: Collection[Future]) -> None:
        """Remove calls from the unfinished ones."""
        with self.lock:
            self.unfinished = [call for call in self.unfinished if call not in calls]

    def take_records(self) -> list[CallRecord]:
        """Return the records so far, and start a new list."""
        records, self.records = self.records, []
        return records


@cache
def call_log() -> CallLog:
    """Return the log of this process."""
    return CallLog()


class Future:
    """A group call and its results, a list by source rank; can be passed unchanged to calls of other groups."""

    _numbers = itertools.count()

    def __init__(
        self,
        pool: Any,
        role: str,
        method: str,
        outcomes: Mapping[int, ObjectRef],
        *,
        places: Sequence[str],
        timeout_s: float,
        results: Mapping[int, ObjectRef] | None = None,
        inputs: Sequence[Future] = (),
    ) -> None:
        """Wrap a call that all ranks of a pool have received.

        Args:
            outcomes: rank -> reference to its `Outcome`.
            places: coordinate and node of each rank, as text.
            results: source rank -> reference to its result, in row order.
            inputs: calls whose rows this call reads.
        """
        self.number, self.submitted_s = next(self._numbers), time.monotonic()
        self.pool, self.role, self.method, self.timeout_s = pool, role, method, timeout_s
        self.running_s = math.inf
        """Moment at which `wait_any` has first seen that ranks carry it out."""
        self.failures: list[RankFailure] = []
        """Failures of the ranks that have answered."""
        self.num_ranks, self._places = len(outcomes), places
        self._outcomes = dict[int, Outcome]()
        self._pending = dict(outcomes)
        """Rank -> its outcome that was not processed; replaced instead of changed, as other threads iterate over it."""
        self.references = list((results or {}).values())
        """References to the results of the source ranks, in row order."""
        self.inputs = list(dict.fromkeys(call for one in inputs for call in (one, *one.inputs)))
        """Unfinished calls whose rows this call reads, directly or through other calls."""
        self._error: WorkerError | None = None
        self._values: list[Any] | None = None
        """The results, once fetched."""

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not answered."""
        return tuple(sorted(self._pending))

    @property
    def reported(self) -> bool:
        """True if the failure of this call, or of a call whose rows it reads, has been raised."""
        return self._error is not None or any(call.failures and call.reported for call in self.inputs)

    def num_ended(self) -> int:
        """Return the number of ranks that have ended the call, without processing outcomes; safe in any thread."""
        pending = list(self._pending.values())
        ended, _ = (
            ray.wait(pending, num_returns=len(pending), timeout=0) if ray.is_initialized() else ([], [])
        )
        return self.num_ranks - len(pending) + len(ended)

    def poll(self) -> bool:
        """Process arrived outcomes, and return True if all ranks have answered; a call that succeeded is recorded.

        Safe in any thread: groups are started side by side, and each start waits for the calls of its pool.
        """
        if not self._pending:
            return True
        log = call_log()
        with log.lock:
            ranks = {ref: rank for rank, ref in self._pending.items()}
            arrived, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=0)
            for rank, ref in ((ranks[ref], ref) for ref in arrived):
                self._outcomes[rank] = outcome = _outcome_of(rank, ref)
                log.count(outcome.inline_bytes)
                if outcome.failure is not None:
                    place = self._places[rank]
                    self.failures.append(
                        replace(outcome.failure, role=self.role, method=self.method, place=place)
                    )
            self._pending = {rank: ref for ref, rank in ranks.items() if rank not in self._outcomes}
            if self._pending or self.failures:
                return not self._pending
            self.inputs.clear()
            if self in log.unfinished:
                log.unfinished.remove(self)
                (log.observer or log.records.append)(self._record())
            return True

    def _record(self) -> CallRecord:
        outcomes = dict(sorted(self._outcomes.items()))
        transferred = Counter[str]()
        for outcome in outcomes.values():
            transferred.update(outcome.transferred)
        return CallRecord(
            self.role,
            self.method,
            {rank: (outcome.begin, outcome.end) for rank, outcome in outcomes.items()},
            {rank: outcome.fetch_seconds for rank, outcome in outcomes.items()},
            transferred,
            {rank: outcome.held_bytes for rank, outcome in outcomes.items()},
            self.pool.name,
        )

    def done(self) -> bool:
        """Return True if every rank has answered or one has failed, so that `get` returns or raises immediately."""
        return self.poll() or bool(self.failures)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every rank has ended the call, without fetching the result.

        The failure of an earlier call is detected immediately, however long others take. By default each earlier call
        may take the timeout of its group, counted from when it is the oldest unfinished one, and then this call;
        `timeout_s` limits all of them together.

        Raises:
            RankFailedError: a rank raised or died, in this call or an earlier one.
            WorkerTimeoutError: ranks did not answer in time.
        """
        if self._error is not None:
            raise self._error
        calls = [*self._ahead(), self]
        end = None if timeout_s is None else time.monotonic() + timeout_s
        oldest, deadline = None, math.inf
        while True:
            pending = [call for call in calls if not call.poll()]
            if self not in pending and not self.failures:
                return
            if any(call.failures for call in calls):
                cause = _first_failed(calls)
                cause._error = cause._error or rank_failed(*root_cause(cause.failures))
                if self.failures:  # otherwise it may still end, and can be waited for again
                    self._error = cause._error
                raise cause._error
            if pending[0] is not oldest:
                oldest, deadline = pending[0], time.monotonic() + pending[0].timeout_s
            remaining = (deadline if end is None else end) - time.monotonic()
            if remaining <= 0:
                raise self.hang(timeout_s) if timeout_s is not None else pending[0].hang()
            references = [ref for call in pending for ref in call._pending.values()]
            ray.wait(references, num_returns=1, timeout=remaining)

    def _ahead(self) -> list[Future]:
        """Return the unfinished calls that must end before this one, as they share its ranks or produce its rows."""
        ahead, pools, inputs = list[Future](), [self.pool], [*self.inputs]
        known = {*call_log().unfinished, *inputs}
        for call in sorted(known, key=lambda call: -call.number):
            if call.number >= self.number or (call.poll() and not call.failures):
                continue
            if call in inputs or (call.pool in pools and not call.reported):
                ahead.append(call)
                pools.append(call.pool)
                inputs += call.inputs
        return ahead[::-1]

    def hang(self, timeout_s: float | None = None) -> WorkerTimeoutError:
        """Return the error for ranks that did not answer within `timeout_s`, by default the call's own limit."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        places = dict[int, str]()
        for rank in self.missing:
            calls = (call for call in call_log().unfinished if call.pool is self.pool)
            earlier = next((call for call in calls if rank in call.missing), self)
            places[rank] = self._places[rank] + (f", still in {earlier}" if earlier is not self else "")
        # Ranks report nothing before the call's own limit.
        words = words_of(self._pending) if limit_s >= self.timeout_s else {}
        return WorkerTimeoutError(
            f"{self} did not end within {limit_s:g} s: {len(places)} of {self.num_ranks}"
            " ranks have not answered; see their stacks in the log, or raise the limit (of a run: timeouts.call_s)\n"
            + "\n".join(report_lines(places, words))
        )

    def get(self, timeout_s: float | None = None) -> list[Any]:
        """Return the results of the source ranks, in row order; raises errors as `wait` does."""
        self.wait(timeout_s)
        if self._values is None:
            try:
                self._values = ray.get(self.references, timeout=self.timeout_s)
            except RayError as error:
                raise lost_results(f"{self} ended", error) from error
            call_log().count(traffic_bytes(self._values))
            self.references.clear()
        return self._values

    def __repr__(self) -> str:
        state = f"waiting for ranks {list(self.missing)}" if self.missing else "complete"
        return f"Future({self}, {state})"

    def __reduce__(self) -> NoReturn:
        raise WrongArgumentsError(
            f"{self!r} cannot be sent to a rank inside another value; pass it as an argument of its own, or call"
            " get() first"
        )


def wait_any(calls: Sequence[Future]) -> None:
    """Wait until one of the calls has ended or failed.

    Raises WorkerTimeoutError for a call that they depend on and that has not ended within its limit, counted from when it
    was first seen running; also if others have ended, as engines do all the time.
    """
    while pending := [call for call in calls if not call.done()]:
        now = time.monotonic()
        for call in (running := _running(pending)):
            call.running_s = min(call.running_s, now)
            if call.running_s + call.timeout_s <= now:
                raise call.hang()
        if len(pending) < len(calls):
            return
        left_s = (call.running_s + call.timeout_s - now for call in running)
        references = [ref for call in pending for ref in call._pending.values()]
        ray.wait(references, num_returns=1, timeout=min(left_s, default=pending[0].timeout_s))


def _running(calls: Sequence[Future]) -> list[Future]:
    """Return the calls that ranks carry out now, on the pools of these calls and of those whose rows they read."""
    pools = {id(one.pool) for call in calls for one in (call, *call.inputs)}
    oldest = dict[int, Future]()
    for call in list(call_log().unfinished):
        if (place := id(call.pool)) in pools and place not in oldest and not call.poll():
            oldest[place] = call
    return [call for call in oldest.values() if not call.failures and all(one.poll() for one in call.inputs)]


def lost_results(what_ended: str, error: RayError) -> WorkerError:
    """Return the error for results of ended calls that Ray no longer has."""
    return WorkerError(
        f"{what_ended}, but its results are lost ({type(error).__name__}: {error}); a rank or its node has died since:"
        " start again from the last checkpoint"
    )


def _first_failed(calls: Sequence[Future]) -> Future:
    """Return the call whose failure caused those of the others; its outcome may not have arrived yet."""
    deadline = time.monotonic() + ECHO_GRACE_S
    while True:
        failed = [call for call in calls if call.failures]
        expected = _expected_causes(calls, failed)
        remaining = deadline - time.monotonic()
        if not expected or remaining <= 0:
            return min(failed, key=lambda call: (all(map(_is_echo, call.failures)), call.number))
        ray.wait(expected, num_returns=1, timeout=remaining)
        for call in calls:
            call.poll()


def _expected_causes(calls: Sequence[Future], failed: Sequence[Future]) -> list[ObjectRef]:
    """Return the pending outcomes that may reveal the cause of the failures so far."""
    if all(_is_echo(failure) for call in failed for failure in call.failures):
        return [ref for call in calls for ref in call._pending.values()]
    # A rank ends its calls in order: it died in the first one that it has not ended.
    died = {(id(call.pool), failure.rank) for call in failed for failure in call.failures if failure.died}
    return [
        ref
        for call in calls
        if call.number < max(other.number for other in failed)
        for rank, ref in call._pending.items()
        if (id(call.pool), rank) in died
    ]


def _is_echo(failure: RankFailure) -> bool:
    return failure.in_collective or failure.lacks_input


def _outcome_of(rank: int, ref: ObjectRef) -> Outcome:
    try:
        return ray.get(ref)
    except RayError as error:  # the process died, or Ray could not transfer arguments or result
        died = isinstance(error, RayActorError)
        text = " ".join(str(error).split())
        now = time.time()
        return Outcome(now, now, RankFailure(rank, f"{type(error).__name__}: {text}", died=died))
