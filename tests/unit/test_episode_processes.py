"""Episodes in real processes: turns and results, every way to fail, and processes that end or hang beneath them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hybridengine.config.episode_section import EpisodeSection
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.episodes import processes
from hybridengine.episodes.processes import Episodes, check_episode
from hybridengine.episodes.wire import DrawnTurn, Ended, Limits, Wanted
from hybridengine.errors import DataError
from hybridengine.guarded.process import GuardedProcess

CASES = "tests.unit.episode_cases"
PROMPT = [5, 6, 7]
LIMIT_S = 120.0
LIMITS: dict[str, Any] = {
    "max_tokens": 64,
    "max_turns": 8,
    "vocab_size": 57,
    "deadline_s": 100.0,
    "blocked_s": 30.0,
    "metrics": ["turns"],
}


def limits(**changes: Any) -> Limits:
    return Limits(**LIMITS | changes)


def section(**options: Any) -> EpisodeSection:
    return EpisodeSection(function=f"{CASES}:does_what_the_answer_says", **options)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Episodes]:
    """Two processes with a tokenizer; no episode of their tests may end them."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_arithmetic_tokenizer().save_pretrained(folder)
    with closing(
        Episodes(section(num_processes=2, max_running=16), limits(deadline_s=10.0), str(folder))
    ) as episodes:
        episodes.start()
        yield episodes


@pytest.fixture
def talking(two_processes: Episodes) -> Iterator[Episodes]:
    """Those processes, without episodes of a test that failed."""
    yield two_processes
    two_processes.drop([*two_processes._episodes])


def row(answer: object = "") -> Mapping[str, Any]:
    return {"number": 4, "prompt": "1+1", "answer": str(answer), "prompt_tokens": PROMPT, "seed": 1}


def group_of(process: object) -> int:
    """Return the process group of a process's code."""
    assert isinstance(process, GuardedProcess) and process._group is not None
    return process._group


def turn_of(wanted: Wanted) -> DrawnTurn:
    """Return the turn that a model would draw: tokens that tell episode and turn."""
    tokens = [8 + wanted.number, wanted.turn] * wanted.max_tokens
    return DrawnTurn(wanted.added, tokens, [-1.0] * len(tokens), True)


def played(
    episodes: Episodes, num_ended: int, before: Callable[[Wanted], None] = lambda wanted: None
) -> tuple[dict[int, Ended], list[Wanted]]:
    """Answer all turns until so many episodes have ended; return these and what was wanted."""
    ended, wanted, deadline = dict[int, Ended](), list[Wanted](), time.monotonic() + LIMIT_S
    while len(ended) < num_ended:
        assert time.monotonic() < deadline, f"only {ended} have ended"
        events = episodes.events(0.1)
        over = {event.number: event for event in events if isinstance(event, Ended)}
        ended |= over
        for event in events:
            if isinstance(event, Wanted) and event.number not in over:
                wanted.append(event)
                before(event)
                episodes.answer(event.number, turn_of(event))
    return ended, wanted


def test_turns_follow_one_another(talking: Episodes) -> None:
    for number in range(8):
        talking.begin(number, row(f"talk {1 + number % 3}"), [])
    assert len(talking) == 8
    ended, wanted = played(talking, 8)
    assert len(talking) == 0
    digit = build_arithmetic_tokenizer()
    for number in range(8):
        turns = [one for one in wanted if one.number == number]
        count = 1 + number % 3
        assert [one.turn for one in turns] == [*range(count)]
        assert [one.max_tokens for one in turns] == [2, 3, 4][:count]
        added = [digit(f"{turn}?")["input_ids"] if turn else [] for turn in range(count)]
        assert [one.added for one in turns] == added
        drawn = sum(2 * one.max_tokens + len(one.added) for one in turns)
        expected = Ended(number, float(3 + drawn), {"turns": count}, [True] * count, turn=count - 1)
        assert ended[number] == expected


def test_a_turn_that_was_given_up_is_not_the_answer_to_the_next_request(talking: Episodes) -> None:
    """It is drawn when the function has asked for another one, of which the rank does not know yet."""
    talking.begin(0, row("again"), [])
    ended, wanted = played(talking, 1, lambda one: time.sleep(1.0 if one.max_tokens == 8 else 0.0))
    assert [(one.turn, one.added, one.max_tokens) for one in wanted] == [(0, [], 2), (1, [], 8), (1, [7], 3)]
    assert ended[0] == Ended(0, 6.0, {}, [True, True], turn=1)


def test_no_more_than_max_running_at_once(talking: Episodes) -> None:
    def begun(num_expected: int) -> set[int]:
        """Wait for so many episodes to want a turn, and half a second for others."""
        numbers, deadline = set[int](), time.monotonic() + LIMIT_S
        while len(numbers) < num_expected and time.monotonic() < deadline:
            numbers |= {event.number for event in talking.events(0.1)}
        time.sleep(0.5)
        return numbers | {event.number for event in talking.events()}

    for number in range(20):
        talking.begin(number, row("talk 1"), [])
    assert begun(16) == {*range(16)}, "the others begin when these end"
    talking.drop([0, 17])
    assert begun(1) == {16}
    talking.drop(range(20))
    assert len(talking) == 0


FAILURES = {
    "raise": ("raised", 1, r"it raised ValueError: that is wrong \(.*episode_cases\.py, line \d+\)"),
    "exit": ("raised", 1, r"it raised SystemExit: 3"),
    "panic": ("raised", 1, r"it raised .*Panic: first line second line \("),
    "cancel": ("raised", 1, r"it raised asyncio\.exceptions\.CancelledError \("),
    "group": ("raised", 1, r"it raised .*EpisodeError: stop=.. must be texts"),
    "sleep": ("deadline", 1, r"it did not end within deadline_s=10 s"),
    "long": ("tokens", 1, r"1000 tokens were added where \d+ of rollout\.max_response_tokens=64 are left"),
    "turns": ("turns", 8, r"turn 8 exceeds rollout\.episode\.max_turns=8"),
    "nan": ("result", 0, r"the reward of an episode is NaN"),
    "text": ("result", 0, r'it returned "a text", a str; return a Result, a number or None'),
    "metric": ("result", 0, r"it returned the metric 'strange'"),
    "forge": ("result", 0, r"turn 0 with tokens that the model did not draw"),
    "stop": ("raised", 1, r"EpisodeError: stop=.. must be texts that are not empty"),
    "unknown": ("raised", 1, r"1000000000 is not a token of the model"),
    "other": ("raised", 1, r"the prompt of turn 1 differs from the \d+ tokens of the episode at token \d+"),
    "twice": ("raised", 1, r"another turn of this episode is being drawn"),
    "fine": ("", 0, ""),
    "none": ("", 0, ""),
    "exclude": ("", 1, ""),
}


def test_lines_of_an_episode_that_was_dropped_are_not_those_of_one_that_begins_again(
    talking: Episodes,
) -> None:
    for _ in range(20):
        talking.begin(3, row("talk 2"), [])
        talking.events(0.02)
        talking.drop([3])
    talking.begin(3, row("talk 2"), [])
    ended, wanted = played(talking, 1)
    assert [one.turn for one in wanted] == [0, 1]
    assert ended[3].kind == ""


def test_every_way_to_fail_is_named_and_the_others_go_on(talking: Episodes) -> None:
    for number, answer in enumerate(FAILURES):
        talking.begin(number, row(answer), [])
    processes_before = [id(one.guarded) for one in talking._processes]
    ended, _ = played(talking, len(FAILURES))
    for number, (kind, turn, text) in enumerate(FAILURES.values()):
        assert (ended[number].kind, ended[number].turn) == (kind, turn), ended[number]
        assert re.search(text, ended[number].text), ended[number]
    by_name = {name: ended[number] for number, name in enumerate(FAILURES)}
    assert (by_name["fine"].reward, by_name["none"].reward) == (1.0, None)
    assert by_name["exclude"].trained == [False, True]
    assert [id(one.guarded) for one in talking._processes] == processes_before, "both have gone on"


def test_an_episode_that_blocks_the_others_fails_and_they_begin_again() -> None:
    with closing(Episodes(section(memory_bytes=2 * 2**30), limits(blocked_s=1.0), None)) as episodes:
        episodes.start()
        for number, answer in enumerate(["allocate", "block", "sleep", "fine"]):
            episodes.begin(number, row(answer), [])
        ended, _ = played(episodes, 3)
        assert ended[1].kind == "blocked"
        assert "it did not let others run for 1 s" in ended[1].text
        assert (ended[0].kind, "MemoryError" in ended[0].text) == ("raised", True)
        assert ended[3].reward == 1.0
        assert len(episodes) == 1, "the one that sleeps has begun again"


def test_episodes_of_a_process_that_is_killed_are_given_their_turns(tmp_path: Path) -> None:
    """One adds the same as before, and each of its turns is drawn once; the other gets a new second turn."""
    with closing(Episodes(section(), limits(), None)) as episodes:
        episodes.start()
        first = episodes._processes[0].guarded
        episodes.begin(0, row("turns"), [])
        episodes.begin(1, row(f"starts {tmp_path / 'number'}"), [])

        def disturb(wanted: Wanted) -> None:
            if (wanted.number, wanted.turn) == (0, 4):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group_of(first), signal.SIGKILL)

        ended, wanted = played(episodes, 2, disturb)
        assert episodes._processes[0].guarded is not first
    assert (ended[0].kind, ended[1].reward) == ("turns", 1.0)
    assert [one.turn for one in wanted if one.number == 0] == [*range(8)]
    others = [one for one in wanted if one.number == 1]
    assert [(one.turn, one.added) for one in others] == [(0, []), (1, [1]), (1, [2])]


def test_an_episode_that_ends_processes_alone_fails() -> None:
    with closing(Episodes(section(), limits(), None)) as episodes:
        episodes.start()
        episodes.begin(0, row("die"), [])
        ended, wanted = played(episodes, 1)
    assert ended[0].kind == "process"
    assert ended[0].text == "its process ended, exit code 7, 2 times with no other episode in it"
    assert len(wanted) == 1, "the second process was given the turn"


def sizes_of_ends(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the number of episodes in each process that has ended, in order."""
    return [int(match[1]) for text in caplog.messages if (match := re.search(r", with (\d+) episodes", text))]


@pytest.mark.parametrize(
    ("answers", "num_processes", "sizes"),
    [
        ({5: "die"}, 1, [16, 8, 4, 2, 1, 1]),
        ({5: "kill"}, 2, [8, 4, 2, 1, 1]),
        ({0: "die", 15: "die"}, 1, [16, 8, 8, 4, 4, 2, 2, 1, 1, 1, 1]),
        ({4: "die", 5: "die"}, 1, [16, 8, 4, 2, 1, 1, 1, 1]),
    ],
    ids=["one", "one of two processes", "two", "two of the last group"],
)
def test_only_episodes_that_end_their_process_fail(
    answers: dict[int, str], num_processes: int, sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The others are given their turns, and no turn is drawn twice."""
    with closing(Episodes(section(num_processes=num_processes), limits(), None)) as episodes:
        episodes.start()
        for number in range(16):
            episodes.begin(number, row(answers.get(number, "nap")), [])
        ended, wanted = played(episodes, 16)
        assert len(episodes) == 0
    assert {number: one.kind for number, one in ended.items() if one.kind} == dict.fromkeys(
        answers, "process"
    )
    assert [one.reward for one in ended.values() if not one.kind] == [1.0] * (16 - len(answers))
    assert sorted((one.number, one.turn) for one in wanted) == [(number, 0) for number in range(16)]
    assert sorted(sizes_of_ends(caplog), reverse=True) == sizes
    if "kill" in answers.values():
        assert "SIGKILL, for lack of memory or by a program, its own code included" in ended[5].text


def test_others_run_while_suspects_do_and_any_can_be_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """On two processes, with a queue: of 0, 2, 4 and 6 in the first one, 4 ends it."""
    most = 0
    with closing(Episodes(section(num_processes=2, max_running=8), limits(), None)) as episodes:
        episodes.start()
        for number in range(12):
            episodes.begin(number, row({4: "die", 2: "sleep", 6: "sleep"}.get(number, "nap")), [])
        ended = dict[int, Ended]()
        deadline = time.monotonic() + LIMIT_S
        while len(ended) < 10:
            assert time.monotonic() < deadline, f"only {ended} have ended"
            for event in episodes.events(0.1):
                if isinstance(event, Wanted):
                    episodes.answer(event.number, turn_of(event))
                else:
                    ended[event.number] = event
            most = max(most, sum(len(one.running) for one in episodes._processes))
            if episodes._suspects and 6 in episodes._episodes:
                assert 6 in [one.number for group in episodes._suspects for one in group]
                assert 2 in [one.number for one in episodes._episodes.values()]
                episodes.drop([6, 2])
        assert len(episodes) == 0 and most == 8
    assert {number for number, one in ended.items() if one.kind} == {4}
    assert [*ended].index(8) < [*ended].index(4), "other episodes begin while the suspects run"
    assert sizes_of_ends(caplog) == [4, 1, 1]


def test_an_episode_that_blocks_suspects_fails_and_they_stay_suspects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(Episodes(section(), limits(blocked_s=1.0), None)) as episodes:
        episodes.start()
        for number, answer in enumerate(["block-late", "nap", "nap", "die"]):
            episodes.begin(number, row(answer), [])
        ended, _ = played(episodes, 4)
    kinds = [ended[number].kind for number in range(4)]
    assert kinds == ["blocked", "", "", "process"]
    assert sizes_of_ends(caplog) == [4, 2, 1, 1]
    assert "asyncio.to_thread, 1 other episodes begin again" in caplog.text


@pytest.mark.parametrize("asks_again", [False, True])
def test_a_turn_is_drawn_once_while_its_process_ends(asks_again: bool) -> None:
    """The engine continues to draw while the episode begins again."""
    with closing(Episodes(section(), limits(), None)) as episodes:
        episodes.start()
        episodes.begin(0, row("exclude"), [])
        (first,) = awaited(episodes)
        assert isinstance(first, Wanted)
        os.killpg(group_of(episodes._processes[0].guarded), signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while episodes._episodes[0].is_waiting:
            assert episodes.events(0.1) == [] and time.monotonic() < deadline
        while asks_again and not episodes._episodes[0].is_waiting:
            assert episodes.events(0.1) == [] and time.monotonic() < deadline
        episodes.answer(0, turn_of(first))
        ended, wanted = played(episodes, 1)
    assert [one.turn for one in wanted] == [1]
    assert (ended[0].kind, ended[0].trained) == ("", [False, True])


def awaited(episodes: Episodes) -> list[Wanted | Ended]:
    """Return the next events."""
    deadline = time.monotonic() + LIMIT_S
    while not (events := episodes.events(0.1)):
        assert time.monotonic() < deadline
    return events


def test_an_episode_that_does_not_end_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 1.0)
    with closing(Episodes(section(), limits(deadline_s=2.0), None)) as episodes:
        episodes.start()
        episodes.begin(0, row("swallow"), [])
        ended, _ = played(episodes, 1)
        assert (ended[0].kind, ended[0].text) == ("deadline", "it went on after deadline_s=2 s")
        episodes.begin(1, row("fine"), [])
        ended, _ = played(episodes, 1)
        assert ended[1].reward == 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("not_async", r"is a function; write it as `async def rollout\(client, row\)`"),
        ("takes_one", r"cannot be called with \(client, row\)"),
        ("CONSTANT", r"is a int; write it"),
        ("nothing", r"cannot be imported"),
    ],
)
def test_a_function_that_no_episode_can_run(function: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"^rollout\.episode\.function={CASES}:{function} .*{message}"):
        check_episode(EpisodeSection(function=f"{CASES}:{function}"))


def test_a_module_that_needs_more_memory_than_its_process_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_module.py").write_text(
        "content = bytearray(2**28)\nasync def plays(client, row): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    check_episode(EpisodeSection(function="large_module:plays"))
    with pytest.raises(DataError, match=r"MemoryError.*correct the module, or raise memory_bytes=134217728$"):
        check_episode(EpisodeSection(function="large_module:plays", memory_bytes=2**27))
