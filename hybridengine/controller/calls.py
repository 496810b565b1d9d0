"""Calls on the ranks of a pool: time-limited waits that the first failure ends, and results."""

from __future__ import annotations

import itertools
import math
import pickle
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from hybridengine.controller.call_log import CallRecord, call_log
from hybridengine.controller.failures import (
    Answer,
    Outcome,
    RankFailure,
    answer_of,
    lost_answer,
    rank_failed,
    root_cause,
)
from hybridengine.controller.relays import LOOK_LIMIT_S, Asked
from hybridengine.controller.row_requests import Batch
from hybridengine.controller.whereabouts import report_lines, words_of
from hybridengine.errors import WorkerError, WorkerTimeoutError, WrongArgumentsError

LOOK_EVERY_S = 0.1
"""Shortest interval between two looks of a wait at the outcomes of all calls, which takes time for each of them."""
ECHO_GRACE_S = 5.0
"""Time to wait for the first failure before reporting one that may be its consequence."""


class Future:
    """A group call and its results, a list by source rank; can be passed unchanged to calls of other groups."""

    _numbers = itertools.count()

    def __init__(
        self,
        pool: Any,
        role: str,
        method: str,
        answers: Mapping[ObjectRef, Sequence[int]],
        *,
        places: Sequence[str],
        timeout_s: float,
        sources: Sequence[int] = (),
        asked: Sequence[Asked] = (),
        inputs: Sequence[Future] = (),
    ) -> None:
        """Wrap a call that all ranks of a pool have been sent.

        Args:
            answers: reference to an `Outcome` or `Answer` -> ranks that it is of.
            places: coordinate and node of each rank, as text.
            sources: ranks whose results are collected, in row order.
            asked: what the pool's branches have been sent.
            inputs: calls whose rows this call reads.
        """
        self.number, self.submitted_s = next(self._numbers), time.monotonic()
        self.pool, self.role, self.method, self.timeout_s = pool, role, method, timeout_s
        self.running_s = math.inf
        """Moment at which `wait_any` has first seen that ranks carry it out."""
        self.failures: list[RankFailure] = []
        """Failures of the ranks that have answered."""
        self.num_ranks, self._places = sum(map(len, answers.values())), places
        self._outcomes = dict[int, Outcome]()
        self._pending = dict(answers)
        """Unprocessed answer -> its ranks; replaced instead of changed, as other threads iterate over it."""
        self._sources, self._asked = sources, asked
        self.batches = _batches(asked, sources)
        """Locations of the rows of the source ranks, in row order; empty if the call gives none."""
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
        return tuple(sorted(rank for ranks in self._pending.values() for rank in ranks))

    @property
    def reported(self) -> bool:
        """True if the failure of this call, or of a call whose rows it reads, has been raised."""
        return self._error is not None or any(call.failures and call.reported for call in self.inputs)

    def num_ended(self) -> int:
        """Return the number of ranks whose answer is there, without processing it; safe in any thread.

        Ranks below a relay answer together.
        """
        pending = self._pending
        ended = _arrived(pending) if ray.is_initialized() else []
        return self.num_ranks - sum(map(len, pending.values())) + sum(len(pending[one]) for one in ended)

    def poll(self) -> bool:
        """Process arrived outcomes, and return True if all ranks have answered; a call that succeeded is recorded.

        Safe in any thread: groups are started side by side, and each start waits for the calls of its pool.
        """
        if not self._pending:
            return True
        log = call_log()
        with log.lock:
            for reference in _arrived(self._pending):
                self._take(reference, _answer(reference, self._pending[reference]))
            if self._pending or self.failures:
                return not self._pending
            self.inputs.clear()
            if self in log.unfinished:
                log.unfinished.remove(self)
                (log.observer or log.records.append)(self._record())
            return True

    def _take(self, reference: ObjectRef, answer: Answer) -> None:
        """Process the outcomes of an answer, and wait for references in it in place of this one."""
        later, inline_bytes = dict[ObjectRef, list[int]](), 0
        for rank, outcome in answer.items():
            if isinstance(outcome, ObjectRef):
                later.setdefault(outcome, []).append(rank)
                continue
            self._outcomes[rank] = outcome
            inline_bytes += outcome.inline_bytes
            if outcome.failure is not None:
                place = self._places[rank]
                self.failures.append(
                    replace(outcome.failure, role=self.role, method=self.method, place=place)
                )
        call_log().count(inline_bytes)
        self._pending = {one: ranks for one, ranks in self._pending.items() if one != reference} | later

    def _look(self) -> None:
        """Ask relays that have not answered which of their ranks have."""
        with call_log().lock:
            silent = [one for one in self._asked if one.branch.children and one.answer in self._pending]
            looks = {one.branch.process.look.remote(one.number): one for one in silent}
            looked, _ = (
                ray.wait(list(looks), num_returns=len(looks), timeout=LOOK_LIMIT_S) if looks else ([], [])
            )
            for reference in looked:
                one = looks[reference]
                # Without an answer, the relay is at fault, and the ranks below it are missing.
                if answer := _answer(reference, ()):
                    self._take(one.answer, answer)

    def _record(self) -> CallRecord:
        outcomes = dict(sorted(self._outcomes.items()))
        transferred = Counter[str]()
        for outcome in outcomes.values():
            if outcome.transferred:
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
            _wait_for_answers(pending, remaining)

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
        for call in (*call_log().unfinished, self):
            if call.pool is self.pool and call.number <= self.number:
                call._look()
        places = dict[int, str]()
        for rank in self.missing:
            calls = (call for call in call_log().unfinished if call.pool is self.pool)
            earlier = next((call for call in calls if rank in call.missing), self)
            places[rank] = self._places[rank] + (f", still in {earlier}" if earlier is not self else "")
        # Ranks report nothing before the call's own limit.
        pending = {rank: one for one, ranks in self._pending.items() for rank in ranks}
        words = words_of(pending) if limit_s >= self.timeout_s else {}
        return WorkerTimeoutError(
            f"{self} did not end within {limit_s:g} s: {len(places)} of {self.num_ranks}"
            " ranks have not answered; see their stacks in the log, or raise the limit (of a run: timeouts.call_s)\n"
            + "\n".join(report_lines(places, words))
        )

    def get(self, timeout_s: float | None = None) -> list[Any]:
        """Return the results of the source ranks, in row order; raises errors as `wait` does."""
        self.wait(timeout_s)
        if self._values is None:
            results = [self._outcomes[rank].result for rank in self._sources]
            self._values = [None if result is None else pickle.loads(result) for result in results]
            self._outcomes.clear()
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
        _wait_for_answers(pending, min(left_s, default=pending[0].timeout_s))


def _wait_for_answers(calls: Sequence[Future], timeout_s: float) -> None:
    """Wait until answers of some calls are there: one, and others that follow within `LOOK_EVERY_S`.

    The ranks of a call answer almost at the same time, and who waits looks at all answers of all calls each time.
    """
    call_of = {reference: call for call in calls for reference in call._pending}
    begin = time.monotonic()
    arrived, _ = ray.wait(list(call_of), num_returns=1, timeout=timeout_s)
    if arrived:
        others = list(call_of[arrived[0]]._pending)
        left_s = timeout_s - (time.monotonic() - begin)
        ray.wait(others, num_returns=len(others), timeout=max(0.0, min(LOOK_EVERY_S, left_s)))


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
        return [reference for call in calls for reference in call._pending]
    # A rank ends its calls in order: it died in the first one that it has not ended.
    died = {(id(call.pool), failure.rank) for call in failed for failure in call.failures if failure.died}
    return [
        reference
        for call in calls
        if call.number < max(other.number for other in failed)
        for reference, ranks in call._pending.items()
        if any((id(call.pool), rank) in died for rank in ranks)
    ]


def _is_echo(failure: RankFailure) -> bool:
    return failure.in_collective or failure.lacks_input


def _arrived(pending: Iterable[ObjectRef]) -> list[ObjectRef]:
    """Return the references whose values are there."""
    references = list(pending)
    return ray.wait(references, num_returns=len(references), timeout=0)[0] if references else []


def _answer(reference: ObjectRef, ranks: Sequence[int]) -> Answer:
    try:
        return answer_of(ranks, ray.get(reference))
    except RayError as error:  # the process died, or Ray could not transfer arguments or result
        return lost_answer(ranks, error)


def _batches(asked: Sequence[Asked], sources: Sequence[int]) -> list[Batch]:
    are_sources = frozenset(sources)
    found = {
        rank: Batch(one.rows, path)
        for one in asked
        if one.rows is not None
        for rank, path in one.branch.paths(are_sources).items()
    }
    return [found[rank] for rank in sources] if found else []
