"""The live view in a terminal: its output, and the state in which it leaves the terminal and the loggers."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from hybridengine.report.live import LiveView, can_show_live


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
