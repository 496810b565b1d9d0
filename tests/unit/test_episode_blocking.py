"""Code of episodes that awaits nothing, in real processes: whose time counts, and processes that answer nothing."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from hybridengine.episodes import processes
from hybridengine.episodes.processes import Episodes
from hybridengine.episodes.wire import DrawnTurn, Wanted
from tests.unit.test_episode_processes import (
    awaited,
    group_of,
    limits,
    played,
    row,
    section,
    sizes_of_ends,
    turn_of,
)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes may be silent for 2 s beyond `blocked_s`, and 1 s before they are asked."""
    monkeypatch.setattr(processes, "SILENT_GRACE_S", 2.0)


def test_short_steps_of_many_episodes_are_not_added_up() -> None:
    """An iteration of the loop takes 3.2 s."""
    with closing(Episodes(section(), limits(blocked_s=1.0), None)) as episodes:
        episodes.start()
        for number in range(16):
            episodes.begin(number, row("pauses 0.2 3"), [])
        ended, wanted = played(episodes, 16)
    assert [ended[number].reward for number in range(16)] == [1.0] * 16
    assert len(wanted) == 16 * 4, "none has begun again"


def test_turns_that_are_given_again_are_pauses() -> None:
    recorded = [DrawnTurn([], [3], [-1.0], False)] * 8
    with closing(Episodes(section(), limits(blocked_s=1.0, max_turns=9), None)) as episodes:
        episodes.start()
        episodes.begin(0, row("pauses 0.4 8"), recorded)
        ended, wanted = played(episodes, 1)
    assert (ended[0].kind, ended[0].trained) == ("", [True] * 9)
    assert [one.turn for one in wanted] == [8]


def test_an_episode_that_holds_all_of_python_fails_alone(
    short_grace: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 1.0)
    with closing(Episodes(section(), limits(blocked_s=1.0, deadline_s=2.0), None)) as episodes:
        episodes.start()
        for number, answer in enumerate(["nap", "holds", "nap", "nap"]):
            episodes.begin(number, row(answer), [])
        ended, wanted = played(episodes, 4)
    assert {number: one.kind for number, one in ended.items()} == {0: "", 1: "blocked", 2: "", 3: ""}
    assert re.match(r"its process did not answer for \d+ s \(blocked_s=1\), as when code", ended[1].text)
    assert ended[1].text.endswith("call such code by run_process, 2 times with no other episode in it")
    assert sizes_of_ends(caplog) == [4, 2, 1, 1]
    assert len(wanted) == 4, "no turn is drawn twice"


def test_episodes_of_a_process_that_is_stopped_for_ever_begin_again(short_grace: None) -> None:
    with closing(Episodes(section(), limits(blocked_s=1.0, deadline_s=20.0), None)) as episodes:
        episodes.start()
        first = episodes._processes[0].guarded

        def disturb(wanted: Wanted) -> None:
            if (wanted.number, wanted.turn) == (0, 2):
                os.killpg(group_of(first), signal.SIGSTOP)

        for number in range(2):
            episodes.begin(number, row("turns"), [])
        ended, wanted = played(episodes, 2, disturb)
    assert [ended[number].kind for number in range(2)] == ["turns", "turns"]
    assert sorted((one.number, one.turn) for one in wanted) == [
        (n, turn) for n in range(2) for turn in range(8)
    ]


def sleeping(episodes: Episodes) -> int:
    """Start an episode that waits for ever, and return the process group of its process."""
    episodes.start()
    episodes.begin(0, row("sleep"), [])
    (wanted,) = awaited(episodes)
    assert isinstance(wanted, Wanted)
    episodes.answer(0, turn_of(wanted))
    return group_of(episodes._processes[0].guarded)


def test_a_process_that_is_stopped_for_a_while_has_not_been_blocked() -> None:
    with closing(Episodes(section(), limits(blocked_s=1.0), None)) as episodes:
        group = sleeping(episodes)
        time.sleep(0.5)
        os.killpg(group, signal.SIGSTOP)
        time.sleep(3)
        os.killpg(group, signal.SIGCONT)
        assert [episodes.events(0.1) for _ in range(20)] == [[]] * 20
        assert group_of(episodes._processes[0].guarded) == group


def test_a_process_is_not_silent_because_its_episodes_wait_or_nobody_listens(short_grace: None) -> None:
    with closing(Episodes(section(), limits(blocked_s=0.5), None)) as episodes:
        group = sleeping(episodes)
        time.sleep(5)
        until_s = time.monotonic() + 5
        while time.monotonic() < until_s:
            assert episodes.events(0.1) == []
        assert group_of(episodes._processes[0].guarded) == group


@pytest.fixture
def many_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 4096, hard))
    with ExitStack() as files:
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_may_have_more_open_files_than_select_takes(many_open_files: None) -> None:
    with closing(Episodes(section(), limits(), None)) as episodes:
        episodes.start()
        assert episodes._processes[0].guarded.channel.fileno() > 1024
        episodes.begin(0, row("fine"), [])
        ended, _ = played(episodes, 1)
    assert ended[0].reward == 1.0
