"""Output of launches that is read late, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from hybridengine.launch import output


def test_all_output_of_a_run_is_passed_on_however_late_it_is_read():
    """Here it fills two pipes and waits in one of them when the run has ended."""
    program = """
import subprocess, sys
from hybridengine.launch import output
output.OUTPUT_LIMIT_S = 0.5
run = subprocess.Popen([sys.executable, "-c", "print((79 * 'x' + chr(10)) * 1375, end='')"], stdout=subprocess.PIPE)
with output.passed_on(run.stdout, lambda: False):
    run.wait()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        time.sleep(5)
        output, _ = process.communicate(timeout=60)
    assert output == (b"x" * 79 + b"\n") * 1375


STRAY = """
import subprocess, sys
from hybridengine.launch import output
output.OUTPUT_LIMIT_S = 1.0
stray = "import time; [print(n, flush=True) or time.sleep(0.3) for n in range(1000)]"
run = subprocess.Popen([sys.executable, "-c", stray], stdout=subprocess.PIPE)
with output.passed_on(run.stdout, lambda: False):
    pass
run.kill()
"""


def test_a_process_that_a_run_has_left_behind_does_not_keep_the_launch_by_its_output():
    with subprocess.Popen([sys.executable, "-c", STRAY], stdout=subprocess.PIPE) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and len(output.splitlines()) < 100, "of 1000 lines, for five minutes"


def test_the_output_of_many_nodes_is_waited_for_no_longer_than_that_of_one(monkeypatch: pytest.MonkeyPatch):
    """Something may keep all of them open."""
    monkeypatch.setattr(output, "OUTPUT_LIMIT_S", 0.5)
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait, daemon=True) for _ in range(100)]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    output.wait_for_output(threads, threading.Lock(), lambda: False)
    assert 0.5 <= time.monotonic() - begun < 25, "not 100 times as long"
    ended.set()


NOTES = """
import sys
from hybridengine.cli.launch_options import note
from hybridengine.launch import output
output.OUTPUT_LIMIT_S = 0.5
for _ in range(3):
    note("x" * 100_000)
sys.exit(75)
"""


@pytest.mark.parametrize("kind", ["a reader that pauses", "no reader", "a full disk"])
def test_lines_that_cannot_be_written_change_neither_the_course_nor_the_status(kind: str):
    end, errors = os.pipe()
    if kind == "no reader":
        os.close(end)
    elif kind == "a full disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), errors)
    command = [sys.executable, "-c", NOTES]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stderr=errors, env=buffered) as process:
        try:
            assert process.wait(60) == 75
        finally:
            process.kill()
    os.close(errors)
    if kind != "no reader":
        os.close(end)
