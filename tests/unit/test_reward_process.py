"""Reward functions in real processes: results, failures, and that no process or file is left behind."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hybridengine.data.reward_process import RewardProcess
from hybridengine.errors import DataError
from hybridengine.guarded.process import child_environment

ROOT = Path(__file__).parents[2]
CASES = "tests.unit.reward_cases"
EXTRA = ("prompts", "prompt_lengths", "response_lengths")
TIMEOUT_S = 1.5
"""Timeout of functions that do not return: long enough for them to reach their final state on a busy machine."""
LONG_S = 60.0
"""Timeout of functions that end by themselves much earlier."""


@pytest.fixture
def process() -> Iterator[Callable[..., RewardProcess]]:
    """Yield a function that creates processes of the case functions, which are ended after the test."""
    made: list[RewardProcess] = []

    def make(function: str, **options: object) -> RewardProcess:
        made.append(RewardProcess(f"{CASES}:{function}", offered=EXTRA, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def failing() -> Iterator[RewardProcess]:
    """One process that fails in many ways and survives them."""
    with closing(RewardProcess(f"{CASES}:does_what_responses_say")) as one:
        yield one


def columns(*responses: str, answers: object = "1") -> dict[str, list]:
    return {"responses": list(responses), "answers": [str(answers)] * len(responses)}


def is_running(number: int) -> bool:
    """Return True if a process exists and is not a zombie: an orphan is reaped whenever its new parent chooses."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def await_end(*numbers: int) -> None:
    deadline = time.monotonic() + LONG_S
    while any(map(is_running, numbers)):
        assert time.monotonic() < deadline, f"of {numbers}, {[*filter(is_running, numbers)]} still run"
        time.sleep(0.01)


def failure_of(one: RewardProcess, *responses: str, answers: object = "1", first_row: int = 0) -> str:
    with pytest.raises(DataError) as caught:
        one.call(columns(*responses, answers=answers), range(first_row, first_row + len(responses)))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


def test_one_process_answers_call_after_call(process):
    one = process("process_numbers")
    assert one.start() == ("responses", "answers")
    first, guard = one.call(columns("a", "b"))
    assert one.call(columns("a", "b")) == [first, guard]
    assert len({int(first), int(guard), os.getpid()}) == 3
    assert is_running(int(first))
    one.close()
    await_end(int(first), int(guard))
    second, _ = one.call(columns("a", "b"))  # starts another process
    assert second != first


@pytest.mark.parametrize(
    ("function", "responses", "expected"),
    [
        ("sum_of_both", ("1", "2.5"), [1.5, 3.0]),
        ("lazily", ("1", "-2e-3"), [1.0, -2e-3]),
        ("later", ("4", "5"), [4.0, 5.0]),
        ("grader", ("1", "2"), [1.0, 0.0]),
        ("lengths", (), []),
        ("lengths", ("\udc80 not UTF-8", "\0"), [11.0, 1.0]),
    ],
)
def test_any_callable_and_any_iterable_of_numbers(process, function, responses, expected):
    assert process(function).call(columns(*responses)) == expected


def test_a_large_batch_goes_through(process):
    texts = [str(size) * size for size in (1, 300_000, 2_000_000)]
    assert process("lengths").call(columns(*texts)) == [float(len(text)) for text in texts]


def test_further_parameters_are_columns(process):
    one = process("with_columns")
    assert one.start() == ("responses", "answers", "prompts", "response_lengths")
    given = columns("a", "b") | {
        "prompts": ["x", "yyy"],
        "response_lengths": [5, 6],
        "prompt_lengths": [0, 0],
    }
    assert one.call(given) == [51.0, 63.0]


def test_the_process_is_a_plain_one_in_a_folder_of_its_own(process, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("RAY_JOB_ID", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("JUDGE_KEY", "kept")
    monkeypatch.chdir(tmp_path)
    one = process("surroundings")
    one.call(columns("a", answers=tmp_path / "seen"))
    seen = json.loads((tmp_path / "seen").read_text())
    heavy = {"torch", "numpy", "ray", "megatron", "vllm", "transformers", "tensordict", "pydantic", "pytest"}
    assert not heavy & set(seen["modules"])
    assert "hybridengine" in seen["modules"]
    environment = seen["environment"]
    assert not {"RANK", "RAY_JOB_ID"} & set(environment)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["JUDGE_KEY"]) == ("", "kept")
    assert seen["group"] == seen["process"] != os.getpgrp()
    assert seen["input"] == ""
    assert seen["inheritable"] == [0, 1, 2]  # child processes inherit nothing of the channel
    assert seen["out_of_memory_score"] == "1000"
    folder = Path(seen["folder"])
    assert folder.parent == Path(tempfile.gettempdir()).resolve()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seen"]
    assert (folder / "left_behind").exists()
    one.close()
    assert not folder.exists()


def test_environment_of_a_rank():
    rank = {
        "RANK": "1",
        "MASTER_ADDR": "x",
        "RAY_ADDRESS": "y",
        "TORCHELASTIC_RUN_ID": "z",
        "HOME": "/h",
        "PATH": "p",
    }
    kept = {name: value for name, value in child_environment(rank).items() if value}
    assert kept == {"HOME": "/h", "PATH": "p", "PYTHONHASHSEED": "0"}


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        (("nan", "b", "c"), "row 21: returned nan, a float; return a finite number that a float32 can hold;"),
        (("inf", "b", "c"), "row 22: returned -inf, a float; return a finite number"),
        (("text", "b", "c"), "row 21: returned '1.0', a str; return a finite number"),
        (("none", "b", "c"), "row 20: returned None, a NoneType; return a finite number"),
        (("list", "b", "c"), "row 21: returned [1.0], a list; return a finite number"),
        (("huge", "b", "c"), "row 21: returned 1000000"),
        (("beyond float32", "b", "c"), "row 21: returned 1e+39, a float; return a finite number"),
        (("few", "b", "c"), "rows 20 to 22: returned 1 scores for 3 responses; return one for each;"),
        (
            ("many", "b", "c"),
            "rows 20 to 22: returned more scores than the 3 responses; return one for each;",
        ),
        (("many",), "row 20: returned more scores than the 1 responses;"),
        (
            ("number", "b", "c"),
            "rows 20 to 22: returned 1.0, a float; return a list with one number for each",
        ),
        (("mapping", "b", "c"), "returned {0: 1.0, 1: 1.0, 2: 1.0}, a dict; return a list"),
        (("characters", "b", "c"), "returned '123', a str; return a list"),
        (("nothing", "b", "c"), "returned None, a NoneType; return a list"),
        (("loop", "22", "three"), "rows 20 to 22, with row 22 at hand: raised ValueError: invalid literal"),
        (("deep", "xy", "33"), "rows 20 to 22, with row 21 at hand: raised ValueError: could not convert"),
        (
            ("deep", "same", "same"),
            "rows 20 to 22, with row 21 at hand: raised ValueError: could not convert",
        ),
        (("nested", "22", "xyz"), "rows 20 to 22, with row 22 at hand: raised ValueError: could not convert"),
        (("two", "different"), "rows 20 to 21: raised ValueError: twodifferent"),
        (("generator", "b", "c"), "with row 21 at hand: raised ZeroDivisionError: float division by zero"),
        (("leave", "b", "c"), "rows 20 to 22: raised SystemExit: 3;"),
        (("interrupt", "b"), "rows 20 to 21: raised KeyboardInterrupt;"),
        (("recurse", "b"), "rows 20 to 21: raised RecursionError: maximum recursion depth exceeded"),
        (("unspeakable", "b"), "raised tests.unit.reward_cases.UnspeakableError: <exception str() failed>"),
    ],
)
def test_a_failure_names_function_row_and_value_and_the_process_goes_on(failing, responses, message):
    before = failing.call(columns("fine"))
    text = failure_of(failing, *responses, first_row=20)
    assert text.startswith(f"reward.function={CASES}:does_what_responses_say, row")
    assert message in text
    first_line = text.splitlines()[0]
    assert first_line.endswith("; correct the function, or let reward.on_failure retry or drop the rows")
    if "raised" in message:
        assert "Traceback (most recent call last):" in text
        assert re.search(
            r'File ".*reward_cases\.py", line \d+, in (does_what|_parsed|_recurse|<genexpr>)', text
        )
    assert "reward_child.py" not in text
    assert failing.call(columns("fine")) == before == [1.0]


def test_a_long_message_is_shortened(failing):
    text = failure_of(failing, "long")
    assert "ValueError: xxx" in text
    assert len(text) < 10_000


@pytest.mark.parametrize(
    ("function", "response", "message"),
    [
        ("exits", "3", "its process ended, exit code 3"),
        ("kills_itself", str(int(signal.SIGSEGV)), "its process ended, killed by SIGSEGV"),
        (
            "kills_itself",
            str(int(signal.SIGKILL)),
            "its process ended, killed by SIGKILL, for lack of memory or by a program, its own code included",
        ),
        ("closes_everything", "a", "its process ended, exit code 1"),
        ("closes_everything", "wait", "its process closed its connections"),
    ],
)
def test_a_process_that_ends_is_reported_at_once_and_started_again(process, function, response, message):
    one = process(function, timeout_s=2 * LONG_S)
    begin = time.monotonic()
    for _ in range(2 if function == "exits" else 1):
        text = failure_of(one, response, first_row=4)
        assert f"reward.function={CASES}:{function}, row 4: {message}; correct the function, or let" in text
    assert time.monotonic() - begin < LONG_S


@pytest.mark.parametrize(
    ("function", "response", "place"),
    [
        ("hangs_in_c", "sleep", "in hangs_in_c"),
        ("hangs_in_c", "match", "in match"),
    ],
)
def test_a_function_that_does_not_return_is_ended_at_the_limit(process, function, response, place, capfd):
    one = process(function, timeout_s=TIMEOUT_S)
    one.start()
    begin = time.monotonic()
    text = failure_of(one, response, "b", first_row=8)
    assert TIMEOUT_S <= time.monotonic() - begin < LONG_S
    assert (
        f"rows 8 to 9: did not return within {TIMEOUT_S} s, and was ended (its stacks are in the log above); raise"
        " reward.timeout_s, lower reward.rows_per_call, correct the function, or let reward.on_failure retry or drop"
        " the rows"
    ) in text
    logged = capfd.readouterr().err
    assert place in logged
    assert "reward_cases.py" in logged


def test_a_process_that_ends_while_its_stacks_are_written_has_not_returned(process):
    """Python writes the stacks of all threads while they run, and may crash doing so."""
    text = failure_of(process("crashes_after", timeout_s=TIMEOUT_S), str(TIMEOUT_S + 0.05))
    assert f"did not return within {TIMEOUT_S} s, and was ended" in text


def test_after_a_hang_there_is_a_new_process(process):
    one = process("hangs", timeout_s=TIMEOUT_S)
    (before,) = one.call(columns("a"))
    failure_of(one, "a", "hang")
    assert not is_running(int(before))
    (after,) = one.call(columns("a"))
    assert after != before
    assert is_running(int(after))


def test_a_process_that_takes_nothing_any_more_is_ended_at_the_limit(process):
    one = process("blocks_afterwards", timeout_s=TIMEOUT_S)
    assert one.call(columns("a")) == [0.0]
    time.sleep(0.2)
    begin = time.monotonic()
    assert "did not return within" in failure_of(one, "x" * 5_000_000)
    assert time.monotonic() - begin < LONG_S


@pytest.mark.parametrize("end", ["wait", "end", "close", "guard"])
def test_what_a_function_has_started_ends_with_it(process, tmp_path, end):
    one = process("starts_children", timeout_s=2 * TIMEOUT_S if end == "wait" else 2 * LONG_S)
    file = tmp_path / "numbers"
    begin = time.monotonic()
    if end in ("wait", "end"):
        text = failure_of(one, end, answers=file)
        assert ("did not return" if end == "wait" else "its process ended, exit code 0") in text
    else:
        assert one.call(columns(end, answers=file)) == [0.0]
    numbers = json.loads(file.read_text())
    if end == "guard":
        os.kill(numbers[1], signal.SIGKILL)
        await_end(numbers[1])
        os.kill(numbers.pop(), signal.SIGKILL)  # nobody is left who knows of it
    one.close()
    await_end(*numbers)
    assert time.monotonic() - begin < LONG_S


@pytest.mark.parametrize("sent", ['["scores", [1.0]]\n["scores", [1.0]]', "\udcff", "x" * 1_100_000])
def test_what_a_function_sends_in_place_of_a_reply_is_an_error(process, sent):
    """The function has access to the channel, and may write anything to it."""
    one = process("answers_by_itself", timeout_s=2 * LONG_S)
    text = failure_of(one, sent, first_row=4)
    assert "row 4: its process sent what is not a reply (" in text
    assert "; correct the function, or let reward.on_failure" in text
    assert len(text) < 1000
    assert one.call(columns("fine")) == [0.0]


def test_what_a_function_sends_is_not_run(process, tmp_path):
    class Harmful:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "run",)

    data = pickle.dumps(Harmful())
    framed = len(data).to_bytes(8, "big") + data
    with pytest.raises(DataError, match="is not a reply"):
        process("answers_by_itself").call(columns(framed.decode("utf-8", "surrogateescape") + "\n"))
    assert not (tmp_path / "run").exists()


def test_scores_arrive_as_they_were(process):
    values = [0.1, -1.0 / 3.0, 5e-324, 3.4028234663852886e38, -0.0]
    found = process("numbers").call(columns(*map(float.hex, values)))
    assert list(map(float.hex, found)) == list(map(float.hex, values))


def test_output_goes_to_the_log_and_not_into_the_scores(process, capfd):
    one = process("prints_a_lot")
    assert one.call(columns("a", "b")) == [7.0, 7.0]
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert sum(line.startswith("line ") for line in lines) == 20_000
    assert "the last words" in lines
    assert "past Python" in lines


def test_memory_is_bounded_where_a_bound_is_given(process):
    one = process("allocates", memory_bytes=300 * 2**20)
    assert one.call(columns("1000")) == [1000.0]
    text = failure_of(one, "600000000")
    assert "row 0: raised MemoryError;" in text
    assert one.call(columns("1000")) == [1000.0]


PARENT = """
import signal, sys
if sys.argv[3:]:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some launchers have it
from hybridengine.data.reward_process import RewardProcess
one = RewardProcess("tests.unit.reward_cases:starts_children")
one.call({"responses": [sys.argv[2]], "answers": [sys.argv[1]]})
print("called", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("doing", [["wait"], ["nothing"], ["wait", "without being told of children"]])
def test_a_parent_that_is_killed_leaves_nothing_behind(tmp_path, doing):
    file = tmp_path / "numbers"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(file), *doing],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    deadline = time.monotonic() + LONG_S
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.01)
    numbers = json.loads(file.read_text())
    assert all(map(is_running, numbers))
    assert list(tmp_path.glob("hybridengine-reward-*"))
    parent.kill()
    parent.communicate()
    await_end(*numbers)
    assert not list(tmp_path.glob("hybridengine-reward-*"))
