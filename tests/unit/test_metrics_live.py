"""The live view: calls compared with a simulation of ranks, times with plain sums, and the terminal's final state."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Task

from hybridengine.controller.calls import Future as GroupCall
from hybridengine.report.live import LiveView, can_show_live

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
        num_ended = sum(end <= moment for _, end in call.spans.values())
        assert note == f"m{call.number}, {num_ended}/{len(call.spans)} ranks done"
        assert any(begin <= moment < end for begin, end in call.spans.values()), "some rank is in it"


def test_a_call_counts_the_ranks_that_have_ended_without_taking_their_outcomes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This includes a rank that died, whose reference contains an error."""
    arrived: set[Any] = {"first"}
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.wait", lambda refs, **_: ([ref for ref in refs if ref in arrived], list[Any]()))
    pool, references = Any, {0: cast(Any, "first"), 1: cast(Any, "second")}
    call = GroupCall(cast(Any, pool), "actor", "update", references, places=["", ""], timeout_s=1.0)
    assert (call.num_ended(), call.num_ranks, call.missing) == (1, 2, (0, 1))
    arrived.add("second")
    assert (call.num_ended(), call.missing) == (2, (0, 1))


def test_only_a_real_terminal_gets_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    main, side = pty.openpty()
    try:
        with open(side, "w", closefd=False) as terminal:
            assert can_show_live(Console(file=terminal, _environ={"TERM": "xterm"}))
            assert not can_show_live(Console(file=terminal, _environ={"TERM": "dumb"}))
        assert not can_show_live(Console(file=io.StringIO(), _environ={"TERM": "xterm", "FORCE_COLOR": "1"}))
    finally:
        os.close(main)
        os.close(side)


def test_the_errors_of_a_run_stay_in_the_file_that_they_were_directed_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80)
    with LiveView(console, 3, lambda role, method: method, list):
        print("an error", file=sys.stderr)
        print("a word")
    assert capsys.readouterr().err == "an error\n"
    assert "a word" in stream.getvalue()


PROGRAM = """
import logging, os, signal, sys, threading, time
from rich.console import Console
from hybridengine.report.live import LiveView, can_show_live
handler = logging.StreamHandler()
logging.getLogger("somebody").addHandler(handler)
console = Console()
assert can_show_live(console)
ended = 0
class call:
    role, method, pool, num_ranks, inputs = "actor", "generate_sequences", "main", 2, ()
    num_ended = lambda: ended
console.print("before")
try:
    with LiveView(console, 7, lambda role, method: method, lambda: [call]) as view:
        view.begin(3)
        time.sleep(0.7)
        logging.getLogger("somebody").warning("a log line")
        logging.getLogger("nobody").warning("an unhandled log line")
        print("a printed line")
        console.print("a line of the run")
        ended = 1
        time.sleep(0.7)
        END
except KeyboardInterrupt:
    print("interrupted")
assert handler.stream is sys.__stderr__
print("after")
"""
ENDINGS = {
    "well": "pass",
    "exception": "raise ValueError('broken')",
    "ctrl-c": "threading.Timer(1.0, lambda: print('ready', flush=True)).start(); time.sleep(30)",
}
"""The interrupted program has slept for a second: an interrupt during printing may repeat a line, or be lost."""


def _in_a_terminal(program: str, ending: str) -> str:
    """Return what a program writes to a terminal of 80 columns and 24 lines; Ctrl-C is typed at "ready"."""
    main, side = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES", "CI", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        environment.pop(name, None)

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests started in the background ignore it

    child = subprocess.Popen(
        [sys.executable, "-c", program.replace("END", ENDINGS[ending])],
        stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True, cwd=Path(__file__).parents[2],
        preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(side)
    output, has_typed, deadline = b"", False, time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        output += part
        if ending == "ctrl-c" and not has_typed and b"ready" in output:
            has_typed = True
            time.sleep(0.3)  # until the other thread has printed the line's end
            os.write(main, b"\x03")
    child.wait(timeout=20)
    os.close(main)
    return output.decode()


def _screen(output: str) -> list[str]:
    """Return the lines of a terminal that obeys carriage return, line feed, cursor up and erase line."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.startswith("\x1b["):
            if token.endswith("A"):
                row = max(0, row - int(token[2:-1] or 1))
            elif token.endswith("K"):
                lines[row] = "" if token == "\x1b[2K" else lines[row][:column]
            else:
                assert token[-1] in "mhl", token
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_terminal_is_left_as_without_a_view(ending: str) -> None:
    output = _in_a_terminal(PROGRAM, ending)
    assert "step 3/7" in output
    assert "generate_sequences" in output
    assert re.search(r"0/2.*1/2", output, re.DOTALL), "it is drawn again while the program sleeps"
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1
    assert output.rindex("\x1b[?25l") < output.rindex("\x1b[?25h")
    lines = [line for line in _screen(output) if line]
    expected = ["before", "a log line", "an unhandled log line", "a printed line", "a line of the run"]
    expected += {"well": ["after"], "exception": [], "ctrl-c": ["ready", "interrupted", "after"]}[ending]
    if ending == "exception":
        assert lines[: len(expected)] == expected
        assert lines[len(expected)].startswith("Traceback")
        assert lines[-1] == "ValueError: broken"
    else:
        assert [line.removeprefix("^C") for line in lines] == expected


def test_handlers_of_loggers_are_given_back() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("kept").addHandler(handler)
    try:
        with LiveView(Console(file=stream, force_terminal=True), 3, lambda role, method: method, list):
            assert handler.stream is stream
        assert handler.stream is stream
    finally:
        logging.getLogger("kept").removeHandler(handler)
