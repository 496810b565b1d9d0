"""Blocking code of episodes in threads of their processes, and calls that outlast it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from hybridengine.episodes.process import Process
from hybridengine.episodes.processes import Episodes
from hybridengine.episodes.threads import Threads
from hybridengine.episodes.wire import Ended
from tests.unit.test_episode_processes import LIMIT_S, group_of, limits, played, row, section, turn_of


def test_calls_of_all_episodes_run_at_once() -> None:
    """Each of 64 calls waits until all have begun."""
    with closing(Episodes(section(), limits(), None)) as episodes:
        episodes.start()
        for number in range(64):
            episodes.begin(number, row("together"), [])
        ended, _ = played(episodes, 64)
    assert {one.kind for one in ended.values()} == {""}


def worn(episodes: Episodes) -> Process:
    """Let calls of eight episodes go on after their deadline; return their process, which then runs episode 8 alone."""
    episodes.start()
    (process,) = episodes._processes
    for number in range(8):
        episodes.begin(number, row("thread 3600"), [])
    begun = time.monotonic()
    answered(episodes, lambda: time.monotonic() > begun + 5)
    episodes.begin(8, row("thread 8"), [])
    answered(episodes, lambda: len(episodes._processes) == 2)
    assert [one.number for one in process.running.values()] == [8]
    return process


def answered(episodes: Episodes, is_done: Callable[[], bool]) -> list[Ended]:
    """Answer turns until something holds; return the episodes that have ended."""
    deadline_s, ended = time.monotonic() + LIMIT_S, list[Ended]()
    while not is_done():
        assert time.monotonic() < deadline_s
        for event in episodes.events(0.1):
            if isinstance(event, Ended):
                ended.append(event)
            else:
                episodes.answer(event.number, turn_of(event))
    return ended


def test_new_episodes_begin_in_another_process_once_calls_go_on_after_their_episodes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(Episodes(section(), limits(deadline_s=10.0), None)) as episodes:
        process = worn(episodes)
        for number in range(9, 13):
            episodes.begin(number, row("thread 0.1"), [])
        ended, _ = played(episodes, 5)
        assert {number: one.kind for number, one in ended.items()} == dict.fromkeys(range(8, 13), "")
        (new,) = {ended[number].reward for number in range(9, 13)}
        old = ended[8].reward
        assert old is not None and old != new, "rewards are the numbers of the processes"
        answered(episodes, lambda: len(episodes._processes) == 1)
        assert process not in episodes._processes
        with pytest.raises(ProcessLookupError):
            os.kill(int(old), 0)
    assert caplog.text.count("go on long after their episodes have ended") == 1


def test_a_worn_process_that_ends_is_not_replaced_again() -> None:
    with closing(Episodes(section(), limits(deadline_s=10.0), None)) as episodes:
        process = worn(episodes)
        os.killpg(group_of(process.guarded), signal.SIGKILL)
        ended, _ = played(episodes, 1)
        assert ended[8].kind == ""
        assert process not in episodes._processes and len(episodes._processes) == 1


def test_episodes_of_worn_processes_count_as_running() -> None:
    with closing(Episodes(section(max_running=2), limits(), None)) as episodes:
        episodes.start()
        (first,) = episodes._processes
        for number in range(3):
            episodes.begin(number, row("sleep"), [])
        episodes.events()
        episodes._retire(first)
        episodes.events()
        assert [len(process.running) for process in episodes._processes] == [2, 0]


def test_no_more_worn_processes_run_than_others() -> None:
    with closing(Episodes(section(), limits(), None)) as episodes:
        episodes.start()
        (first,) = episodes._processes
        episodes.begin(0, row("thread 1"), [])
        episodes.events()
        for _ in range(2):
            episodes._retire(first)  # the process repeats the message
        (_, second) = episodes._processes
        episodes._retire(second)
        assert episodes._processes == [first, second]
        played(episodes, 1)
        episodes.begin(1, row("thread 1"), [])
        episodes.events()
        assert episodes._processes == [second], "the first has ended with its last episode"
        episodes._retire(second)
        assert len(episodes._processes) == 2 and second.is_worn


def test_calls_of_tasks_that_an_episode_has_started_for_all_are_not_left_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first episode starts sixteen workers, each of which is always in a short call."""
    with closing(Episodes(section(), limits(), None)) as episodes:
        episodes.start()
        processes = [*episodes._processes]
        episodes.begin(0, row("workers 16"), [])
        played(episodes, 1)
        begun = time.monotonic()
        answered(episodes, lambda: time.monotonic() > begun + 3)
        assert episodes._processes == processes
    assert not caplog.text


@pytest.mark.parametrize(
    ("memory_bytes", "num_threads", "most_left"),
    [(None, 4096, 8), (2**27, 4, 2), (2**30, 16, 8), (2**29, 8, 4), (2**40, 4096, 8)],
)
def test_stacks_of_threads_take_an_eighth_of_the_memory(
    memory_bytes: int | None, num_threads: int, most_left: int
) -> None:
    threads = Threads(memory_bytes)
    assert (threads._max_workers, threads.most_left) == (num_threads, most_left)


def test_a_call_that_has_ended_is_not_left() -> None:
    threads = Threads(None)
    quick, slow = threads.submit(time.sleep, 0), threads.submit(time.sleep, 2)
    quick.result()
    assert threads.num_left({quick, slow}) == 1
    slow.result()
    threads.shutdown()
    assert threads.num_left(set()) == 0


def test_an_episode_is_not_blocked_by_what_another_has_left_behind() -> None:
    with closing(Episodes(section(), limits(blocked_s=1.0), None)) as episodes:
        episodes.start()
        for number, answer in enumerate(["orphan", "nap"]):
            episodes.begin(number, row(answer), [])
        ended, _ = played(episodes, 2)
    assert {number: one.kind for number, one in ended.items()} == {0: "", 1: ""}
