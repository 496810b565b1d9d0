"""Blocking code of episodes in threads of their processes, and what goes on after its episode."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing

import pytest

from hybridengine.episodes.processes import Episodes
from hybridengine.episodes.threads import Threads
from hybridengine.episodes.wire import Wanted
from tests.unit.test_episode_processes import LIMIT_S, group_of, limits, played, row, section, turn_of


def test_calls_of_all_episodes_run_at_once() -> None:
    """Each of 64 calls waits until all have begun."""
    with closing(Episodes(section(), limits(), None)) as episodes:
        episodes.start()
        for number in range(64):
            episodes.begin(number, row("together"), [])
        ended, _ = played(episodes, 64)
    assert {one.kind for one in ended.values()} == {""}


def test_new_episodes_begin_in_another_process_once_calls_go_on_after_their_episodes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(Episodes(section(), limits(deadline_s=6.0), None)) as episodes:
        episodes.start()
        for number in range(8):
            episodes.begin(number, row("thread 3600"), [])
        ended, _ = played(episodes, 8)
        assert {one.kind for one in ended.values()} == {"deadline"}
        episodes.begin(8, row("thread 5"), [])
        wait_for(episodes, 2, "a new process")
        for number in range(9, 13):
            episodes.begin(number, row("thread 0.1"), [])
        ended, _ = played(episodes, 5)
        assert {number: one.kind for number, one in ended.items()} == dict.fromkeys(range(8, 13), "")
        (worn,) = {ended[8].reward}
        (new,) = {ended[number].reward for number in range(9, 13)}
        assert worn != new, "rewards are the numbers of the processes"
        wait_for(episodes, 1, "the end of the worn process")
        with pytest.raises(ProcessLookupError):
            os.kill(int(worn or 0), 0)
    assert caplog.text.count("go on after the end of their episodes") == 1


def test_a_worn_process_that_ends_is_not_replaced_again() -> None:
    with closing(Episodes(section(), limits(deadline_s=6.0), None)) as episodes:
        episodes.start()
        for number in range(8):
            episodes.begin(number, row("thread 3600"), [])
        played(episodes, 8)
        episodes.begin(8, row("thread 5"), [])
        wait_for(episodes, 2, "a new process")
        (worn,) = [one for one in episodes._processes if one.running]
        os.killpg(group_of(worn.guarded), signal.SIGKILL)
        ended, _ = played(episodes, 1)
        assert ended[8].kind == ""
        assert worn not in episodes._processes and len(episodes._processes) == 1


def wait_for(episodes: Episodes, num_processes: int, what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while len(episodes._processes) != num_processes:
        assert time.monotonic() < deadline_s, f"{what} was not there in time"
        for event in episodes.events(0.1):
            assert isinstance(event, Wanted)
            episodes.answer(event.number, turn_of(event))


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
