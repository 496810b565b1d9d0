"""Good and bad reward functions for tests; the processes under test load them, so the imports are light."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

Texts = Sequence[str]

calls = 0


def lengths(responses: Texts, answers: Texts) -> list[int]:
    return [len(response) for response in responses]


def grade(verdicts: Texts, answers: Texts) -> list[float]:
    """Return the grade of a verdict in JSON, plus 100 times the answer."""
    return [
        json.loads(verdict)["grade"] + 100 * int(answer)
        for verdict, answer in zip(verdicts, answers, strict=True)
    ]


def sum_of_both(responses: Texts, answers: Texts) -> list[float]:
    return [
        float(response) + 0.5 * float(answer) for response, answer in zip(responses, answers, strict=True)
    ]


def answer_lengths(responses: Texts, answers: Texts) -> list[float]:
    """Return a reward that depends on every character and on the row's own answer."""
    return [len(response) + 100.0 * int(answer) for response, answer in zip(responses, answers, strict=True)]


def never_returns(responses: Texts, answers: Texts) -> list[float]:
    """Record the call in the file that the answer names, and stay in it."""
    Path(answers[0]).touch()
    time.sleep(600)
    return []


def call_sizes(responses: Texts, answers: Texts) -> list[int]:
    return [len(responses)] * len(responses)


def process_numbers(responses: Texts, answers: Texts) -> list[int]:
    """Return the id of this process for the first row, and of the guard for all others."""
    return [os.getpid() if row == 0 else os.getppid() for row in range(len(responses))]


def meets_others(responses: Texts, answers: Texts) -> list[int]:
    """Return the id of the process once three of them are in the folder that the answer names."""
    Path(answers[0], str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(os.listdir(answers[0])) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    return [os.getpid()] * len(responses)


def lazily(responses: Texts, answers: Texts) -> Iterator[float]:
    for response in responses:
        yield float(response)


async def later(responses: Texts, answers: Texts) -> list[float]:
    return [float(response) for response in responses]


def with_columns(
    responses: Texts, answers: Texts, prompts: Texts, *, response_lengths: Sequence[int]
) -> list:
    return [len(prompt) + 10 * length for prompt, length in zip(prompts, response_lengths, strict=True)]


def surroundings(responses: Texts, answers: Texts) -> list[float]:
    """Write a description of the process's environment into the file that the first answer names."""
    seen = {
        "modules": sorted(name for name in sys.modules if "." not in name),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "group": os.getpgrp(),
        "process": os.getpid(),
        "input": os.read(0, 1).decode(),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "inheritable": [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_inheritable(fd)],
        "out_of_memory_score": Path("/proc/self/oom_score_adj").read_text().strip(),
    }
    Path("left_behind").write_text("into the working directory")
    Path(answers[0]).write_text(json.dumps(seen))
    return [0.0] * len(responses)


def _is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # the descriptor of the listing itself
        return False


def does_what_responses_say(responses: Texts, answers: Texts) -> object:
    """Fail in the way that the first response names; no variable holds the name."""
    if responses[0] in RESULTS:
        return RESULTS[responses[0]]
    match responses[0]:
        case "loop":
            for response in responses:
                int(response.replace("loop", "1"))
        case "deep":
            return [_parsed(response) for response in responses]
        case "nested":
            first, *others = responses
            return [_parsed(other) + len(first) for other in others]
        case "two":
            one, other = responses[0], responses[1]
            raise ValueError(one + other)
        case "leave":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "recurse":
            return _recurse(0)
        case "long":
            raise ValueError("x" * 100_000)
        case "unspeakable":
            raise UnspeakableError
        case "generator":
            return (1.0 / (row - 1) for row in range(len(responses)))
    return [1.0] * len(responses)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


RESULTS: dict[str, object] = {
    "nan": [1.0, float("nan"), 1.0],
    "inf": [1.0, 1.0, float("-inf")],
    "text": [1.0, "1.0", 1.0],
    "none": [None, 1.0, 1.0],
    "list": [1.0, [1.0], 1.0],
    "huge": [1.0, 10**400, 1.0],
    "beyond float32": [1.0, 1e39, 1.0],
    "few": [1.0],
    "many": [1.0] * 4,
    "number": 1.0,
    "mapping": {0: 1.0, 1: 1.0, 2: 1.0},
    "characters": "123",
    "nothing": None,
}


def _parsed(response: str) -> float:
    return 1.0 if response == "deep" else float(response)


def _recurse(depth: int) -> int:
    return _recurse(depth + 1) + 1


def exits(responses: Texts, answers: Texts) -> list[float]:
    os._exit(int(responses[0]))


def kills_itself(responses: Texts, answers: Texts) -> list[float]:
    os.kill(os.getpid(), int(responses[0]))
    time.sleep(100)
    return []


def closes_everything(responses: Texts, answers: Texts) -> list[float]:
    os.closerange(3, 2**16)
    if responses[0] == "wait":
        time.sleep(100)
    return [0.0] * len(responses)


def hangs(responses: Texts, answers: Texts) -> list[float]:
    """Hang if a response says so."""
    for response in responses:
        if response == "hang":
            time.sleep(100)
    return [float(os.getpid())] * len(responses)


def hangs_in_c(responses: Texts, answers: Texts) -> list[float]:
    if responses[0] == "sleep":
        ctypes.PyDLL(None).sleep(100)  # without releasing the interpreter's lock
    re.match(r"(a+)+$", "a" * 64 + "b")
    return []


def crashes_after(responses: Texts, answers: Texts) -> list[float]:
    """End this process after the given number of seconds."""
    time.sleep(float(responses[0]))
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def blocks_afterwards(responses: Texts, answers: Texts) -> list[float]:
    """Return, and a moment later stop all Python code in this process."""
    threading.Timer(0.1, ctypes.PyDLL(None).sleep, [100]).start()
    return [0.0] * len(responses)


def starts_children(responses: Texts, answers: Texts) -> list[float]:
    """Start children, the last one detached; write ids into the file that the answer names; then wait, end, or return."""
    forked = os.fork()
    if forked == 0:
        time.sleep(100)
        os._exit(0)
    started = subprocess.Popen(["sleep", "100"])
    numbers = [os.getpid(), os.getppid(), forked, started.pid]
    numbers.append(subprocess.Popen(["sleep", "100"], start_new_session=True).pid)
    Path(answers[0]).write_text(json.dumps(numbers))
    if responses[0] == "wait":
        time.sleep(100)
    if responses[0] == "end":
        os._exit(0)
    return [0.0] * len(responses)


def answers_by_itself(responses: Texts, answers: Texts) -> list[float]:
    """Write a response on every open socket and end the process; return if it is "fine"."""
    if responses[0] == "fine":
        return [0.0] * len(responses)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and Path(f"/proc/self/fd/{descriptor}").is_socket():
            data = memoryview(responses[0].encode("utf-8", "surrogateescape") + b"\n")
            while data:
                data = data[os.write(descriptor, data) :]
    time.sleep(100)
    return []


def numbers(responses: Texts, answers: Texts) -> list[float]:
    return [float.fromhex(response) for response in responses]


def prints_a_lot(responses: Texts, answers: Texts) -> list[float]:
    for number in range(20_000):
        print(f"line {number} of the function's own output, which goes to the log and nowhere else")
    print("the last words", file=sys.stderr)
    os.write(1, b"past Python\n")
    return [7.0] * len(responses)


def allocates(responses: Texts, answers: Texts) -> list[float]:
    return [float(len(bytearray(int(response)))) for response in responses]


def fails_at_first(responses: Texts, answers: Texts) -> list[float]:
    """Fail at every odd call."""
    global calls
    calls += 1
    if calls % 2:
        raise ConnectionError(f"call {calls}")
    return [float(response) for response in responses]


def fails_for_some(responses: Texts, answers: Texts) -> list[float]:
    """Fail if a response is not a number."""
    return [_parsed(response) for response in responses]


def one_list(responses: Texts) -> list[float]:
    return [0.0] * len(responses)


def wrong_order(prompts: Texts, responses: Texts, **columns: Sequence) -> list[float]:
    return [0.0] * len(responses)


def unknown_column(responses: Texts, answers: Texts, judge: str) -> list[float]:
    return [0.0] * len(responses)


class Grader:
    """A callable object."""

    def __call__(self, responses: Texts, answers: Texts) -> list[bool]:
        return [response == answer for response, answer in zip(responses, answers, strict=True)]


grader = Grader()
not_a_function = 3
