"""The live view: calls compared with a simulation of ranks, times with plain sums."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Task

from hybridengine.report.live import LiveView
from tests.unit.report_runs import ASYNCHRONOUS

LONG = "reward_of_a_term_whose_name_is_longer_than_any_terminal_is_wide_" * 3


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(eq=False)
class Call:
    """A call as the view reads it."""

    role: str
    method: str
    num_ranks: int = 1
    inputs: tuple[Any, ...] = ()
    pool: str = "main"
    ended: int = 0

    def num_ended(self) -> int:
        return self.ended


class Seen(LiveView):
    """A view that can be read as text at any time of its own clock."""

    def __init__(self, num_steps: int = 100, width: int = 80, height: int = 24) -> None:
        self.clock = Clock()
        console = Console(
            file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None,
            _environ={}, get_time=self.clock,
        )  # fmt: skip
        self.calls: list[Call] = []
        super().__init__(
            console, num_steps, lambda role, method: f"phase of {role}.{method}", lambda: self.calls
        )

    def text(self) -> str:
        with self.console.capture() as captured:
            self.console.print(self.get_renderable())
        return captured.get()

    def row(self, role: str) -> Task:
        self.text()
        return self._roles[role]

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
    switch, generate = (
        Call("actor", "switch_to_generate", 4, ended=4),
        Call("actor", "generate_sequences", 4, ended=1),
    )
    view.calls = [switch, generate, Call("reward", "compute_scores", 4, (generate,))]
    view.text()
    view.clock.now_s += 5.25
    lines = [line.rstrip() for line in view.text().splitlines()]
    assert re.fullmatch(r"step 13/100 \S+ +0:04:55", lines[0])  # 50 + 12 * 20 + 5
    left = (100 - 12) * 20  # seconds
    expected = f"time left: about {left // 60} min {left % 60:02d} s"
    assert lines[1] == f"now phase of actor.generate_sequences, 100 tokens/s, {expected}"
    assert re.fullmatch(r"  actor +\S+ +0:00:05 generate_sequences, 1/4 ranks done", lines[2])
    assert re.fullmatch(r"  reward +-:--:-- waits: compute_scores", lines[3])


def test_an_asynchronous_run_shows_its_queue_the_ages_of_tokens_and_idle_pools() -> None:
    view = Seen(width=110)
    view.begin(3)
    engines = [Call("generation", "advance", pool=f"engines.{number}") for number in range(2)]
    view.calls = [*engines, Call("actor", "update", 2)]
    before = view.text().splitlines()
    view.end(ASYNCHRONOUS | {"step": 3})
    lines = [line.rstrip() for line in view.text().splitlines()]
    assert len(lines) == len(before) + 1
    assert lines[2] == (
        "queue 96 complete, 40 unfinished; age 0.81, at most 2, 1.2% masked; idle engines 30%, main 12%"
    )
    assert re.fullmatch(r"  generation +0:00:00 advance, 2/2 engines at work", lines[3])
    assert re.fullmatch(r"  actor +0:00:00 update, 0/2 ranks done", lines[4])
    engines[0].ended = 1
    view.clock.now_s += 3
    assert re.search(r"generation +0:00:00 advance, 1/2 engines at work", view.text())
    view.clock.now_s += 90
    assert re.search(r"generation +0:01:30 advance, 1/2 engines at work", view.text())


def test_nothing_has_begun() -> None:
    text = Seen().text()
    assert text.startswith("step 0/100 ")
    assert "now -, time left: after the first step" in text
    assert "tokens/s" not in text


def test_an_evaluation_says_so() -> None:
    view = Seen()
    view.begin(0, "evaluating:")
    view.calls = [Call("actor", "generate_sequences")]
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
    view.calls = [Call(role, "compute_log_probs", 16), Call("critic", role, 16)]
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
    view.calls = [Call(f"role{number}", "update") for number in range(20)]
    with view.console.capture() as captured, view:
        pass
    frames = captured.get().split("\x1b[2K")
    assert max(frame.count("\n") for frame in frames) < height


def test_a_call_is_under_way_from_when_its_ranks_are_free_and_its_rows_exist() -> None:
    view = Seen()
    generate = Call("actor", "generate_sequences", 2)
    log_probs = Call("actor", "compute_log_probs", 2, (generate,))
    scores = Call("reward", "compute_scores", 1, (generate,), "scorers")
    view.calls = [generate, log_probs, scores]
    actor, reward = view.row("actor"), view.row("reward")
    view.clock.now_s += 2.0
    assert (actor.fields["note"], actor.elapsed) == ("generate_sequences, 0/2 ranks done", 2.0)
    assert (reward.fields["note"], reward.elapsed) == ("waits: compute_scores", None)
    generate.ended = 1
    view.clock.now_s += 1.0
    view.text()
    assert (actor.fields["note"], actor.elapsed) == ("generate_sequences, 1/2 ranks done", 3.0)
    view.calls.remove(generate)  # it succeeded, but is still among the inputs
    view.text()
    view.clock.now_s += 0.5
    assert (actor.fields["note"], actor.elapsed) == ("compute_log_probs, 0/2 ranks done", 0.5)
    assert (reward.fields["note"], reward.elapsed) == ("compute_scores, 0/1 ranks done", 0.5)
    scores.ended, log_probs.ended = 1, 2
    view.text()
    assert (actor.fields["note"], reward.fields["note"]) == ("", "")


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
        view.calls.append(
            Call(
                call.role,
                f"m{call.number}",
                len(call.spans),
                tuple(view.calls[one] for one in call.inputs),
                str(call.pool),
                sum(end <= moment for _, end in call.spans.values()),
            )
        )
    view.text()

    for role in dict.fromkeys(call.role for call in calls):
        unfinished = [call for call in calls if call.role == role and call.end_s > moment]
        if not unfinished:
            assert role not in view._roles
            continue
        note = view.row(role).fields["note"]
        call = unfinished[0]
        if note == f"waits: m{call.number}":
            assert any(begin > moment for begin, _ in call.spans.values()), "not all ranks are in it yet"
            continue
        pending = [one for one in calls if one.end_s > moment]
        pools = {one.pool for one in unfinished}
        if len(pools) > 1:
            at_work = sum(next(one for one in pending if one.pool == pool).role == role for pool in pools)
            assert note == f"m{call.number}, {at_work}/{len(pools)} engines at work"
            continue
        num_ended = sum(end <= moment for _, end in call.spans.values())
        assert note == f"m{call.number}, {num_ended}/{len(call.spans)} ranks done"
        assert any(begin <= moment < end for begin, end in call.spans.values()), "some rank is in it"
