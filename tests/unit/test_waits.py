"""Waits for calls on many ranks: the number of looks at outcomes, and how soon a failure is seen. Ray and its clock are
simulated: a reference is a number, whose outcome arrives at a known moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybridengine.controller import calls
from hybridengine.controller.call_log import call_log
from hybridengine.controller.calls import LOOK_EVERY_S, Future, wait_any
from hybridengine.controller.failures import Outcome, RankFailedError, RankFailure
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.relays import FAN_OUT, branches_over
from hybridengine.errors import WorkerTimeoutError

NUM_RANKS, NUM_CALLS = 64, 12


@dataclass
class SimulatedRay:
    """Ray's `wait` and `get`, and a clock that only waiting moves."""

    now: float = 0.0
    num_looks: int = 0
    arrivals: dict[int, tuple[float, Outcome]] = field(default_factory=dict)

    def wait(
        self, references: Sequence[int], num_returns: int, timeout: float
    ) -> tuple[list[int], list[int]]:
        self.num_looks += 1
        moments = sorted(self.arrivals[one][0] for one in references)
        self.now = max(self.now, min(moments[num_returns - 1], self.now + timeout))
        ready = [one for one in references if self.arrivals[one][0] <= self.now]
        return ready[:num_returns], ready[num_returns:]

    def get(self, reference: int) -> Outcome:
        moment, outcome = self.arrivals[reference]
        assert moment <= self.now
        return outcome

    def call(self, pool: ResourcePool, moments: Sequence[float], failing: Sequence[int] = ()) -> Future:
        """Return a call whose ranks answer at these moments."""
        answers: dict[Any, list[int]] = {}
        for rank, moment in enumerate(moments):
            reference = len(self.arrivals)
            failure = RankFailure(rank, "ValueError: bad luck") if rank in failing else None
            self.arrivals[reference] = moment, Outcome(0.0, moment, failure)
            answers[reference] = [rank]
        places = [f"place {rank}" for rank in range(len(moments))]
        call = Future(pool, "role", f"call_{len(self.arrivals)}", answers, places=places, timeout_s=60.0)
        call_log().add(call)
        return call


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedRay:
    simulated = SimulatedRay()
    clock = SimpleNamespace(monotonic=lambda: simulated.now, time=lambda: simulated.now)
    monkeypatch.setattr(calls, "ray", simulated)
    monkeypatch.setattr(calls, "time", clock)
    monkeypatch.setattr(calls, "words_of", lambda pending: {})
    for name in ("unfinished", "records"):
        monkeypatch.setattr(call_log(), name, [])
    return simulated


def test_a_wait_does_not_look_once_per_rank(simulated: SimulatedRay) -> None:
    """Twelve calls of a step, whose 64 ranks answer over 50 ms each."""
    pool = ResourcePool([NUM_RANKS])
    step = [
        simulated.call(pool, [5.0 * number + rank * 0.05 / NUM_RANKS for rank in range(NUM_RANKS)])
        for number in range(1, NUM_CALLS + 1)
    ]
    step[-1].wait()
    assert simulated.now == pytest.approx(5.0 * NUM_CALLS + 0.05, abs=0.001)
    assert [record.method for record in call_log().records] == [call.method for call in step]
    # Two waits for each call, and one look at each call that is left: not a multiple of the 768 answers.
    assert simulated.num_looks < NUM_CALLS * (NUM_CALLS + 4)


def test_a_failure_is_raised_while_others_go_on_to_answer(simulated: SimulatedRay) -> None:
    pool = ResourcePool([NUM_RANKS])
    simulated.call(pool, [rank * 0.5 for rank in range(NUM_RANKS)], failing=[5])
    with pytest.raises(RankFailedError, match=r"role\.call_64 failed on rank 5 \(place 5\)"):
        simulated.call(pool, [100.0] * NUM_RANKS).wait()
    assert simulated.now <= 5 * 0.5 + LOOK_EVERY_S


def test_a_failure_of_a_later_call_is_not_kept_waiting_by_an_earlier_one(simulated: SimulatedRay) -> None:
    pool = ResourcePool([2])
    simulated.call(pool, [1.0, 40.0])
    with pytest.raises(RankFailedError, match=r"role\.call_4 failed on rank 0"):
        simulated.call(pool, [2.0, 41.0], failing=[0]).wait()
    assert simulated.now <= 2.0 + LOOK_EVERY_S


def test_the_limit_is_kept_to_while_answers_arrive(simulated: SimulatedRay) -> None:
    pool = ResourcePool([NUM_RANKS])
    call = simulated.call(pool, [59.97 + rank * 0.05 for rank in range(NUM_RANKS)])
    with pytest.raises(WorkerTimeoutError, match=r"did not end within 60 s: 63 of 64 ranks"):
        call.wait()
    assert simulated.now == pytest.approx(60.0)


def test_engines_that_answer_are_looked_at_together(simulated: SimulatedRay) -> None:
    """64 engines of 8 ranks, which answer at once; the first has been waited for before."""
    engines = [ResourcePool([8], name=f"engines.{number}") for number in range(64)]
    running = [
        simulated.call(pool, [1.0 + number / 10 + rank / 1000 for rank in range(8)])
        for number, pool in enumerate(engines)
    ]
    wait_any(running)
    assert running[0].done()
    assert simulated.now == pytest.approx(1.007)
    assert simulated.num_looks < 5 * len(running), "not once for each of the engine's eight answers"


def test_relays_tell_of_ranks_one_by_one_after_a_failure(simulated: SimulatedRay) -> None:
    """A relay answers at the first failure: its other ranks are waited for by references of their own."""
    early, late = cast(Any, 1000), cast(Any, _Reference())
    failed = Outcome(0.0, 1.0, RankFailure(0, "ValueError: bad luck"))
    simulated.arrivals |= {early: (1.0, {0: failed, 1: late}), late: (3.0, Outcome(0.0, 3.0))}  # type: ignore[dict-item]
    call = Future(ResourcePool([2]), "role", "call", {early: [0, 1]}, places=["a", "b"], timeout_s=9.0)
    with pytest.raises(RankFailedError, match=r"role\.call failed on rank 0 \(a\)"):
        call.wait()
    assert call.missing == (1,)
    simulated.now = 3.0
    assert call.poll()
    assert call.missing == ()


class _Reference(calls.ObjectRef):  # pyright: ignore[reportGeneralTypeIssues]
    """A reference without an object."""

    def __init__(self) -> None: ...


@pytest.mark.parametrize(
    ("num_ranks", "num_called", "num_relays"),
    [
        (16, 16, 0),
        (17, 1, 1),
        (64, 1, 1),
        (128, 2, 2),
        (1024, 16, 16),
        (4096, 16, 64 + 16),
        (16384, 16, 256 + 16),
    ],
)
def test_few_processes_are_called_however_many_ranks_there_are(
    num_ranks: int, num_called: int, num_relays: int
) -> None:
    below: list[int] = []
    branches = branches_over(range(num_ranks), lambda part: below.append(len(part)))
    assert (len(branches), len(below)) == (num_called, num_relays)
    assert max(below, default=0) <= FAN_OUT
    assert [rank for branch in branches for rank in branch.ranks] == list(range(num_ranks))
    paths = [branch.paths(range(0, num_ranks, 8)) for branch in branches]
    assert [rank for found in paths for rank in found] == list(range(0, num_ranks, 8))
    if (
        num_ranks == 16384
    ):  # the third branch begins at rank 2048; below it are 16 relays of 64 ranks, 8 of them sources
        assert (paths[2][2048], paths[2][2048 + 64 + 16]) == ((0, 0), (1, 2))
