"""The live view as a terminal shows it: what it says, how wide it is, and what it leaves behind."""

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
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from hybridengine.metrics.call_progress import CallProgress
from hybridengine.metrics.live import LiveView, can_show_live
from hybridengine.metrics.step_progress import StepProgress

LONG = "reward_of_a_term_whose_name_is_longer_than_any_terminal_is_wide_" * 3


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Run:
    """A run that can be put into any state, and its view."""

    def __init__(self, num_steps: int = 100, eval_every: int = 10) -> None:
        self.clock = Clock()
        self.steps = StepProgress(num_steps, eval_every, True, self.clock)
        self.calls = CallProgress(self.clock)

    def text(self, width: int = 80, height: int = 24) -> str:
        console = Console(
            file=io.StringIO(),
            force_terminal=True,
            width=width,
            height=height,
            color_system=None,
            _environ={},
        )
        console.print(
            LiveView(console, self.steps, self.calls, lambda role, method: f"phase of {role}.{method}")
        )
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def play(self, step_s: float, eval_s: float, num_steps: int) -> None:
        """Step 0 and `num_steps` more, of 2000 tokens each."""
        for step in range(num_steps + 1):
            metrics: dict[str, float] = {}
            if step:
                self.steps.begin_step(step)
                self.clock.now_s += step_s
                metrics = {
                    "reward/mean": step / 16,
                    "time/step_s": step_s,
                    "throughput/tokens_per_s": 2000 / step_s,
                }
            if step % 10 == 0:
                self.steps.begin_evaluation(step)
                self.clock.now_s += eval_s
                metrics["eval/exact_match"] = 0.25 + step / 100
            self.steps.end({"step": step, **metrics})


def test_everything_that_a_person_wants_to_know() -> None:
    run = Run()
    run.play(step_s=20.0, eval_s=50.0, num_steps=12)
    run.steps.begin_step(13)
    run.calls.begin_step()
    run.calls.call_made(1, "actor", "switch_to_generate", "main", 4, [])
    for rank in range(4):
        run.calls.rank_ended(1, "main", rank)
    run.calls.call_made(2, "actor", "generate_sequences", "main", 4, [])
    run.calls.call_made(3, "reward", "compute_scores", "main", 4, [2])
    run.calls.rank_ended(2, "main", 3)
    run.clock.now_s += 5.25
    text = run.text(100)
    lines = [line.rstrip() for line in text.splitlines()]
    assert re.fullmatch(r"step 13/100 \S+ +12%", lines[0])
    # 87 steps after this one at 20 s, nine evaluations (20, 30, ... 100) at 50 s, and the rest of this step
    left = 87 * 20 + 9 * 50 + 20 - 5.25
    assert f"about {int(left // 60)} min {round(left % 60):02d} s left" in text
    passed = 12 * 20 + 2 * 50 + 5.25
    assert f"{int(passed // 60)} min {round(passed % 60):02d} s passed" in text
    assert "now phase of actor.generate_sequences" in text
    assert "reward 0.750, first 0.062, best 0.750" in text
    assert "eval 35.0%, first 25.0%" in text
    assert "100 tokens/s, mean 100" in text
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert cells["actor"] == ["generate_sequences", "5.25", "s", "3/4", "1/2"]
    assert cells["reward"] == ["waits:", "compute_scores", "0/1"]


def test_nothing_has_begun() -> None:
    text = Run().text(60)
    assert text.startswith("step 0/100 ")
    assert "now -" in text
    assert "time left: after the first step" in text
    assert "tokens/s" not in text
    assert "reward" not in text
    assert "role" not in text


def test_an_evaluation_says_so() -> None:
    run = Run()
    run.steps.begin_evaluation(0)
    run.calls.call_made(1, "actor", "generate_sequences", "main", 1, [])
    assert "evaluating: phase of actor.generate_sequences" in run.text()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("role", ["actor", LONG, "評価の役割" * 12])
def test_no_line_is_wider_than_the_terminal_and_facts_stay_whole(width: int, role: str) -> None:
    run = Run()
    run.play(step_s=3.5, eval_s=1.0, num_steps=11)
    run.steps.begin_step(12)
    run.calls.call_made(1, role, "compute_log_probs", "main", 16, [])
    run.calls.call_made(2, "critic", role, "main", 16, [1])
    run.clock.now_s += 2.0
    text = run.text(width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    if width >= 60:
        assert "reward 0.688, first 0.062, best 0.688" in text
        assert "571 tokens/s, mean 571" in text
        assert re.search(rf"{role[:2]}.* +compute_log_probs +2\.00 s +16/16 +0/1", text)
    if role == LONG and width == 60:
        assert "…" in text


@pytest.mark.parametrize("height", [1, 2, 5, 10])
def test_no_more_lines_than_the_terminal_can_take_back(height: int) -> None:
    run = Run()
    for number in range(20):
        run.calls.call_made(number, f"role{number}", "update", "main", 1, [])
    assert len(run.text(80, height).splitlines()) == max(1, height - 1)


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
    run, stream = Run(), io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80)
    with LiveView(console, run.steps, run.calls, lambda role, method: method):
        print("an error", file=sys.stderr)
        print("a word")
    assert capsys.readouterr().err == "an error\n"
    assert "a word" in stream.getvalue()


PROGRAM = """
import logging, os, signal, sys, threading, time
from rich.console import Console
from hybridengine.metrics.call_progress import CallProgress
from hybridengine.metrics.live import LiveView, can_show_live
from hybridengine.metrics.step_progress import StepProgress
handler = logging.StreamHandler()
logging.getLogger("somebody").addHandler(handler)
console = Console()
assert can_show_live(console)
steps, calls = StepProgress(7, 0, False), CallProgress()
console.print("before")
try:
    with LiveView(console, steps, calls, lambda role, method: method):
        steps.begin_step(3)
        calls.call_made(1, "actor", "generate_sequences", "main", 2, [])
        time.sleep(0.7)
        logging.getLogger("somebody").warning("a log line")
        logging.getLogger("nobody").warning("an unhandled log line")
        print("a printed line")
        console.print("a line of the run")
        calls.rank_ended(1, "main", 0)
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
"""Who is interrupted sleeps since a second: while printing, a line may come twice, and an interrupt be lost."""


def _in_a_terminal(program: str, ending: str) -> str:
    """What a program writes to a terminal of 80 columns and 24 lines; Ctrl-C is typed at "ready"."""
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
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # who starts tests in the background has it ignored

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
        except OSError:  # the other side has been closed
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
    """Lines of a terminal that obeys carriage returns, line feeds, cursor up, erase line, and shows the rest."""
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
    assert re.search(r"2/2.*1/2", output, re.DOTALL), "it is drawn again while the program sleeps"
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
    stream, run = io.StringIO(), Run()
    handler = logging.StreamHandler(stream)
    logging.getLogger("kept").addHandler(handler)
    try:
        with LiveView(
            Console(file=stream, force_terminal=True), run.steps, run.calls, lambda role, method: method
        ):
            assert handler.stream is stream
        assert handler.stream is stream
    finally:
        logging.getLogger("kept").removeHandler(handler)
