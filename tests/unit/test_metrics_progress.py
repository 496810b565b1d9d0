"""What the live view knows: calls under way against a simulation of ranks, steps and time left against plain sums."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.controller.exchange import CallObserver
from hybridengine.controller.observing import observe_call
from hybridengine.metrics.call_progress import CallProgress, RoleProgress
from hybridengine.metrics.held_out import HeldOutResult
from hybridengine.metrics.step_progress import Stage, StepProgress, num_evaluations


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _by_role(progress: CallProgress) -> dict[str, RoleProgress]:
    return {role.role: role for role in progress.read()}


def test_a_call_is_busy_from_when_its_rank_was_free_and_its_rows_were_there() -> None:
    clock = Clock()
    calls = CallProgress(clock)
    calls.call_made(1, "actor", "generate_sequences", "main", 2, [])
    calls.call_made(2, "actor", "compute_log_probs", "main", 2, [1])
    calls.call_made(3, "reward", "compute_scores", "scorers", 1, [1])
    clock.now_s += 2.0
    assert calls.read() == [
        RoleProgress("actor", 0, 2, "generate_sequences", 2.0, 2, 2),
        RoleProgress("reward", 0, 1, "compute_scores", None, 0, 1),
    ]
    calls.rank_ended(1, "main", 0)
    clock.now_s += 1.0
    actor = _by_role(calls)["actor"]
    assert (actor.method, actor.since_s, actor.num_busy, actor.num_done) == ("generate_sequences", 3.0, 1, 0)
    calls.rank_ended(1, "main", 1)
    clock.now_s += 0.5
    assert calls.read() == [
        RoleProgress("actor", 1, 2, "compute_log_probs", 0.5, 2, 2),
        RoleProgress("reward", 0, 1, "compute_scores", 0.5, 1, 1),
    ]
    calls.rank_ended(3, "scorers", 0)
    calls.rank_ended(2, "main", 1)
    calls.rank_ended(2, "main", 0)
    assert calls.read() == [RoleProgress("actor", 2, 2), RoleProgress("reward", 1, 1)]


def test_a_new_step_counts_again_and_carries_on_what_is_under_way() -> None:
    calls = CallProgress(Clock())
    calls.call_made(1, "actor", "update", "main", 1, [])
    calls.rank_ended(1, "main", 0)
    calls.call_made(2, "actor", "update", "main", 1, [])
    calls.begin_step()
    assert calls.read() == [RoleProgress("actor", 0, 1, "update", 0.0, 1, 1)]


def test_what_was_called_before_anyone_looked_harms_nothing() -> None:
    calls = CallProgress(Clock())
    calls.rank_ended(7, "main", 0)
    calls.call_made(8, "actor", "update", "main", 1, [6, 7])
    calls.rank_ended(8, "main", 0)
    calls.rank_ended(8, "main", 0)
    assert calls.read() == [RoleProgress("actor", 1, 1)]


@dataclass
class _Simulated:
    """A call as a simulation of ranks sees it: it begins on a rank when the rank is free and all inputs have ended."""

    number: int
    role: str
    pool: int
    duration_s: float
    inputs: list[int]
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        return max(end for _, end in self.spans.values())


POOL_RANKS = (2, 1, 3)


@settings(deadline=None, max_examples=60)
@given(
    plan=st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.integers(0, 2),
            st.integers(1, 9),
            st.sets(st.integers(0, 11), max_size=3),
        ),
        min_size=1,
        max_size=12,
    ),
    moment=st.floats(0, 60),
)
def test_roles_at_any_moment_as_in_a_simulation(
    plan: list[tuple[str, int, int, set[int]]], moment: float
) -> None:
    calls: list[_Simulated] = []
    free: dict[tuple[int, int], float] = {}
    for number, (role, pool, duration, inputs) in enumerate(plan):
        call = _Simulated(number, role, pool, float(duration), [one for one in inputs if one < number])
        ready = max((calls[one].end_s for one in call.inputs), default=0.0)
        for rank in range(POOL_RANKS[pool]):
            begin = max(ready, free.get((pool, rank), 0.0))
            free[pool, rank] = begin + call.duration_s + 0.25 * rank
            call.spans[rank] = begin, free[pool, rank]
        calls.append(call)

    clock = Clock(0.0)
    progress = CallProgress(clock)
    for call in calls:
        progress.call_made(
            call.number, call.role, f"m{call.number}", str(call.pool), len(call.spans), call.inputs
        )
    ends = sorted((end, call.number, rank) for call in calls for rank, (_, end) in call.spans.items())
    for end, number, rank in ends:
        if end <= moment:
            clock.now_s = end
            progress.rank_ended(number, str(calls[number].pool), rank)
    clock.now_s = moment

    for role in progress.read():
        mine = [call for call in calls if call.role == role.role]
        running = {
            call.number: [begin for begin, end in call.spans.values() if begin <= moment < end]
            for call in mine
        }
        running = {number: begun for number, begun in running.items() if begun}
        unfinished = [call.number for call in mine if call.end_s > moment]
        assert (role.num_done, role.num_made) == (len(mine) - len(unfinished), len(mine))
        if running:
            longest = {number: moment - min(begun) for number, begun in running.items()}
            assert role.since_s == pytest.approx(max(longest.values()))
            shown = int((role.method or "")[1:])
            assert longest[shown] == pytest.approx(max(longest.values()))
            assert role.num_busy == len(running[shown])
        else:
            assert (role.num_busy, role.since_s) == (0, None)
            assert role.method == (f"m{unfinished[0]}" if unfinished else None)


class _Observer:
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def call_made(
        self, number: int, role: str, method: str, pool: str, num_ranks: int, inputs: Sequence[int]
    ) -> None:
        self.seen.append((number, role, method, pool, num_ranks, tuple(inputs)))

    def rank_ended(self, number: int, pool: str, rank: int) -> None:
        self.seen.append((number, pool, rank))


def test_the_controller_tells_of_a_call_and_of_each_rank_as_its_answer_arrives() -> None:
    """Also of a rank that died, whose reference holds an error."""
    answers: list[Future[object]] = [Future(), Future()]
    references: dict[int, Any] = {
        rank: SimpleNamespace(future=lambda one=one: one) for rank, one in enumerate(answers)
    }
    operation: Any = SimpleNamespace(number=5, role="actor", method="update", pool="main")
    produced = SimpleNamespace(future=SimpleNamespace(operation=SimpleNamespace(number=3)))
    observer = _Observer()
    checked: CallObserver = observer
    observe_call(checked, operation, references, [produced])
    assert observer.seen == [(5, "actor", "update", "main", 2, (3,))]
    thread = threading.Thread(target=lambda: answers[1].set_exception(RuntimeError("died")))
    thread.start()
    thread.join()
    answers[0].set_result(None)
    assert observer.seen[1:] == [(5, "main", 1), (5, "main", 0)]


@given(num_steps=st.integers(1, 40), every=st.integers(0, 12), first=st.integers(1, 41))
def test_evaluations_are_counted_as_the_run_makes_them(num_steps: int, every: int, first: int) -> None:
    made = [
        step for step in range(first, num_steps + 1) if step == num_steps or (every and step % every == 0)
    ]
    assert num_evaluations(first, num_steps, every) == len(made)


SECONDS = st.floats(0.25, 50)


@settings(deadline=None)
@given(
    num_steps=st.integers(1, 12),
    every=st.integers(0, 4),
    step_s=st.lists(SECONDS, min_size=12, max_size=12),
    eval_s=st.lists(SECONDS, min_size=13, max_size=13),
    stop=st.integers(1, 12),
    share=st.floats(0, 0.99),
    in_evaluation=st.booleans(),
)
def test_time_left_is_what_the_medians_say_of_what_is_still_to_come(
    num_steps: int,
    every: int,
    step_s: list[float],
    eval_s: list[float],
    stop: int,
    share: float,
    in_evaluation: bool,
) -> None:
    """A run is played to a point inside step `stop` or its evaluation; what is left is listed stage by stage."""
    clock = Clock()
    progress = StepProgress(num_steps, every, True, clock)
    stop = min(stop, num_steps)
    evaluated = [step == num_steps or bool(every and step % every == 0) for step in range(num_steps + 1)]
    evaluated[0] = True
    taken_steps, taken_evals = [], []
    for step in range(stop):
        if step:
            progress.begin_step(step)
            clock.now_s += step_s[step - 1]
            taken_steps.append(step_s[step - 1])
        if evaluated[step]:
            progress.begin_evaluation(step)
            clock.now_s += eval_s[step]
            taken_evals.append(eval_s[step])
        progress.end({"step": step})
    progress.begin_step(stop)
    if in_evaluation and evaluated[stop]:
        clock.now_s += step_s[stop - 1]
        taken_steps.append(step_s[stop - 1])
        progress.begin_evaluation(stop)
        under_way, to_come = statistics.median(taken_evals), list(range(stop + 1, num_steps + 1))
    elif not taken_steps:
        assert progress.read().left_s is None
        return
    else:
        under_way, to_come = statistics.median(taken_steps), list(range(stop + 1, num_steps + 1))
        under_way += statistics.median(taken_evals) if evaluated[stop] else 0.0
    began = clock.now_s
    stage = progress.read()
    median_s = statistics.median(taken_steps)
    clock.now_s += share * (statistics.median(taken_evals) if stage.stage is Stage.EVALUATION else median_s)
    expected = under_way - (clock.now_s - began)
    for step in to_come:
        expected += median_s + (statistics.median(taken_evals) if evaluated[step] else 0.0)
    assert progress.read().left_s == pytest.approx(expected, abs=1e-6)
    clock.now_s += 1e6  # what takes longer than ever leaves what comes after it
    rest = sum(median_s + (statistics.median(taken_evals) if evaluated[step] else 0.0) for step in to_come)
    if stage.stage is Stage.STEP and evaluated[stop]:
        rest += statistics.median(taken_evals)
    assert progress.read().left_s == pytest.approx(rest, abs=1e-3)


def test_a_run_without_held_out_prompts_waits_for_no_evaluation() -> None:
    clock = Clock()
    progress = StepProgress(3, 1, False, clock)
    progress.end({"step": 0})
    progress.begin_step(1)
    assert progress.read().left_s is None
    clock.now_s += 4.0
    progress.end({"step": 1})
    progress.begin_step(2)
    clock.now_s += 1.0
    assert progress.read().left_s == pytest.approx(2 * 4.0 - 1.0)
    assert progress.read().passed_s == 5.0


def test_throughput_rewards_and_evaluations_of_the_rows() -> None:
    progress = StepProgress(9, 0, True, Clock())
    progress.end({"step": 0, "eval/exact_match": 0.25})
    tokens, seconds = [1000.0, 3000.0, 500.0], [1.0, 2.0, 7.0]
    for step, reward in enumerate([0.5, 0.75, 0.625], start=1):
        rate = tokens[step - 1] / seconds[step - 1]
        progress.end(
            {
                "step": step,
                "reward/mean": reward,
                "throughput/tokens_per_s": rate,
                "time/step_s": seconds[step - 1],
            }
        )
    reading = progress.read()
    assert (reading.reward, reading.first_reward, reading.best_reward) == (0.625, 0.5, 0.75)
    assert reading.tokens_per_s == pytest.approx(500 / 7)
    assert reading.mean_tokens_per_s == pytest.approx(4500 / 10)
    assert reading.held_out == reading.first_held_out == HeldOutResult(0.25, is_share=True)
    assert reading.num_done == 3


def test_the_last_evaluation_and_the_first_one_of_scores_without_a_full_one() -> None:
    progress = StepProgress(2, 1, True, Clock())
    for step, score in enumerate([-0.5, None, 1.25]):
        progress.end({"step": step, "eval/score_mean": score})
    reading = progress.read()
    assert (str(reading.held_out), str(reading.first_held_out)) == ("1.250", "-0.500")


def test_a_reward_that_is_not_finite_is_shown_and_does_not_hide_the_best() -> None:
    progress = StepProgress(9, 0, True, Clock())
    for step, reward in enumerate([None, 0.5, None], start=1):
        progress.end({"step": step, "reward/mean": reward})
    reading = progress.read()
    assert reading.reward is not None
    assert math.isnan(reading.reward)
    assert reading.best_reward == 0.5
