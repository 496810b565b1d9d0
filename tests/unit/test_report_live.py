"""The live view: calls compared with a simulation of ranks, times with plain sums."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Task

from hybridengine.controller.calls import CallObserver
from hybridengine.controller.futures import Future as GroupCall
from hybridengine.report.live import LiveView

LONG = "reward_of_a_term_whose_name_is_longer_than_any_terminal_is_wide_" * 3


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Seen(LiveView):
    """A view that can be read as text at any time of its own clock."""

    def __init__(self, num_steps: int = 100, width: int = 80, height: int = 24) -> None:
        self.clock = Clock()
        console = Console(
            file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None,
            _environ={}, get_time=self.clock,
        )  # fmt: skip
        super().__init__(console, num_steps, lambda role, method: f"phase of {role}.{method}")

    def text(self) -> str:
        with self.console.capture() as captured:
            self.console.print(self.get_renderable())
        return captured.get()

    def row(self, role: str) -> Task:
        return next(task for task in self.tasks if task.description == f"  {role}")

    def play(self, step_s: float, first: int, last: int) -> None:
        """Play steps of 2000 tokens each."""
        for step in range(first, last + 1):
            self.begin(step)
            self.clock.now_s += step_s
            self.end({"step": step, "throughput/tokens_per_s": 2000 / step_s})


def test_everything_that_a_person_wants_to_know() -> None:
    view = Seen(width=100)
    view.begin(0, "evaluating:")
    view.clock.now_s += 50
    view.end({"step": 0, "eval/exact_match": 0.25})
    view.play(20.0, 1, 12)
    view.begin(13)
    view.call_made(1, "actor", "switch_to_generate", "main", 4, [])
    for rank in range(4):
        view.rank_ended(1, "main", rank)
    view.call_made(2, "actor", "generate_sequences", "main", 4, [])
    view.call_made(3, "reward", "compute_scores", "main", 4, [2])
    view.rank_ended(2, "main", 3)
    view.rank_ended(2, "main", 3)  # reported twice
    view.clock.now_s += 5.25
    lines = [line.rstrip() for line in view.text().splitlines()]
    assert re.fullmatch(r"step 13/100 \S+ +0:04:55", lines[0])  # 50 + 12 * 20 + 5
    left = (100 - 12) * 20  # seconds
    expected = f"time left: about {left // 60} min {left % 60:02d} s"
    assert lines[1] == f"now phase of actor.generate_sequences, 100 tokens/s, {expected}"
    assert re.fullmatch(r"  actor +\S+ +0:00:05 generate_sequences, 1/4 ranks done", lines[2])
    assert re.fullmatch(r"  reward +-:--:-- waits: compute_scores", lines[3])


def test_nothing_has_begun() -> None:
    text = Seen().text()
    assert text.startswith("step 0/100 ")
    assert "now -, time left: after the first step" in text
    assert "tokens/s" not in text


def test_an_evaluation_says_so() -> None:
    view = Seen()
    view.begin(0, "evaluating:")
    view.call_made(1, "actor", "generate_sequences", "main", 1, [])
    assert "evaluating: phase of actor.generate_sequences" in view.text()


@pytest.mark.parametrize("first", [1, 51])
def test_the_time_left_is_the_steps_left_at_the_pace_so_far(first: int) -> None:
    """This includes resumed runs: steps of the earlier run do not count for the pace."""
    view = Seen(100)
    view.play(10.0, first, first)
    assert view.tasks[0].time_remaining == (100 - first) * 10
    view.play(40.0, first + 1, first + 2)
    assert view.tasks[0].time_remaining == (98 - first) * 30
    view.play(1.0, first + 3, 100)
    assert view.tasks[0].time_remaining == 0


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("role", ["actor", LONG, "評価の役割" * 12])
def test_no_line_is_wider_than_the_terminal(width: int, role: str) -> None:
    view = Seen(width=width)
    view.play(3.5, 1, 11)
    view.begin(12)
    view.call_made(1, role, "compute_log_probs", "main", 16, [])
    view.call_made(2, "critic", role, "main", 16, [1])
    text = view.text()
    assert all(cell_len(line) <= width for line in text.splitlines())
    if width >= 60:
        assert "571 tokens/s" in text.replace("\n", " ")
    if width >= 80:
        assert "compute_log_probs, 0/16 ranks done" in text
    if role == LONG and width == 60:
        assert "…" in text


@pytest.mark.parametrize("height", [1, 2, 5, 10])
def test_no_more_lines_than_the_terminal_has(height: int) -> None:
    view = Seen(height=height)
    for number in range(20):
        view.call_made(number, f"role{number}", "update", "main", 1, [])
    with view.console.capture() as captured, view:
        pass
    frames = captured.get().split("\x1b[2K")
    assert max(frame.count("\n") for frame in frames) < height


def test_a_call_is_under_way_from_when_its_ranks_are_free_and_its_rows_exist() -> None:
    view = Seen()
    view.call_made(1, "actor", "generate_sequences", "main", 2, [])
    view.call_made(2, "actor", "compute_log_probs", "main", 2, [1])
    view.call_made(3, "reward", "compute_scores", "scorers", 1, [1])
    view.clock.now_s += 2.0
    actor, reward = view.row("actor"), view.row("reward")
    assert (actor.fields["note"], actor.elapsed) == ("generate_sequences, 0/2 ranks done", 2.0)
    assert (reward.fields["note"], reward.elapsed) == ("waits: compute_scores", None)
    view.rank_ended(1, "main", 0)
    view.clock.now_s += 1.0
    assert (actor.fields["note"], actor.elapsed) == ("generate_sequences, 1/2 ranks done", 3.0)
    view.rank_ended(1, "main", 1)
    view.clock.now_s += 0.5
    assert (actor.fields["note"], actor.elapsed) == ("compute_log_probs, 0/2 ranks done", 0.5)
    assert (reward.fields["note"], reward.elapsed) == ("compute_scores, 0/1 ranks done", 0.5)
    view.rank_ended(3, "scorers", 0)
    for rank in range(2):
        view.rank_ended(2, "main", rank)
    assert (actor.fields["note"], reward.fields["note"]) == ("", "")


def test_calls_that_were_made_before_the_view_harm_nothing() -> None:
    view = Seen()
    view.rank_ended(7, "main", 0)
    view.call_made(8, "actor", "update", "main", 1, [6, 7])
    assert view.row("actor").fields["note"] == "update, 0/1 ranks done"
    view.rank_ended(8, "main", 0)
    view.rank_ended(8, "main", 0)
    assert view.row("actor").fields["note"] == ""


@dataclass
class _Simulated:
    """A call in a simulation of ranks: it begins on a rank when the rank is free and all inputs have ended."""

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

    view = Seen()
    for call in calls:
        view.call_made(
            call.number, call.role, f"m{call.number}", str(call.pool), len(call.spans), call.inputs
        )
    ends = sorted((end, call.number, rank) for call in calls for rank, (_, end) in call.spans.items())
    for end, number, rank in ends:
        if end <= moment:
            view.rank_ended(number, str(calls[number].pool), rank)

    for role in dict.fromkeys(call.role for call in calls):
        unfinished = [call for call in calls if call.role == role and call.end_s > moment]
        note = view.row(role).fields["note"]
        if not unfinished:
            assert note == ""
            continue
        call = unfinished[0]
        if note == f"waits: m{call.number}":
            assert any(begin > moment for begin, _ in call.spans.values()), "not all ranks are in it yet"
            continue
        num_ended = sum(end <= moment for _, end in call.spans.values())
        assert note == f"m{call.number}, {num_ended}/{len(call.spans)} ranks done"
        assert any(begin <= moment < end for begin, end in call.spans.values()), "some rank is in it"


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
    """This includes a rank that died, whose reference contains an error."""
    answers: list[Future[object]] = [Future(), Future()]
    references: dict[int, Any] = {
        rank: SimpleNamespace(future=lambda one=one: one) for rank, one in enumerate(answers)
    }
    pool: Any = SimpleNamespace(name="main")
    produced, call = (
        GroupCall(pool, "actor", "update", outcomes, places=["", ""], timeout_s=1.0)
        for outcomes in ({}, references)
    )
    call._inputs.append(produced)
    observer = _Observer()
    checked: CallObserver = observer
    call.observe(checked)
    assert observer.seen == [(call.number, "actor", "update", "main", 2, (produced.number,))]
    thread = threading.Thread(target=lambda: answers[1].set_exception(RuntimeError("died")))
    thread.start()
    thread.join()
    answers[0].set_result(None)
    assert observer.seen[1:] == [(call.number, "main", rank) for rank in (1, 0)]
