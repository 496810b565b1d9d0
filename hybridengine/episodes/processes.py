"""Processes that run the episodes of an engine: what they ask for and are given, and what happens when one ends."""

from __future__ import annotations

import itertools
import json
import logging
import select
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridengine.config.episode_section import EpisodeSection
from hybridengine.episodes.remote import RemoteProcess, read_key
from hybridengine.episodes.wire import DrawnTurn, Ended, Limits, Wanted, line
from hybridengine.errors import DataError
from hybridengine.guarded.process import GuardedProcess

SERVER = "hybridengine.episodes.child:serve"
MOST_STARTS = 3
"""Processes that may end under an episode before it fails."""
GRACE_S = 30.0
"""Time after its deadline in which an episode ends by itself."""
SEND_TIMEOUT_S = 30.0
"""Time limit for a process to read a line."""
LINE_BYTES = 2**26
"""Longest line of a process."""

_logger = logging.getLogger(__name__)


@dataclass
class _Episode:
    number: int
    row: Mapping[str, Any]
    turns: list[DrawnTurn]
    key: int = 0
    """Number under which a process runs it: another one for each start, since lines of an earlier one may follow."""
    process: _Process | None = None
    num_starts: int = 0
    begun_s: float = 0.0
    wanted: Wanted | None = None


@dataclass
class _Process:
    guarded: GuardedProcess | RemoteProcess
    received: bytearray = field(default_factory=bytearray)
    running: dict[int, _Episode] = field(default_factory=dict)
    """Its episodes, by their keys."""
    is_stuck: bool = False
    """True if it reads no lines, or does not end what it should have ended."""

    def send(self, kind: str, content: Any) -> None:
        """Send a line; a process that has ended is noticed when it is read."""
        try:
            self.guarded.channel.sendall(line(kind, content))
        except TimeoutError:
            self.is_stuck = True
        except OSError:
            pass


class Episodes:
    """Episodes of one engine, on one rank; numbers are those of their responses.

    An episode whose process ends is run again in a new one, and given the turns that it had.
    """

    def __init__(
        self, section: EpisodeSection, limits: Limits, tokenizer: str | None, start_timeout_s: float = 600.0
    ) -> None:
        self._section, self._limits, self._tokenizer = section, limits, tokenizer
        self._start_timeout_s = start_timeout_s
        self._processes: list[_Process] = []
        self._episodes: dict[int, _Episode] = {}
        self._queue = deque[_Episode]()
        """Episodes that have not begun, or that begin again."""
        self._keys = itertools.count()
        self._ended: list[Ended] = []

    def start(self) -> None:
        """Start the processes; raise DataError if the function cannot be loaded in time."""
        self._processes = [self._started() for _ in range(self._section.num_processes)]

    def __len__(self) -> int:
        return len(self._episodes)

    def begin(self, number: int, row: Mapping[str, Any], turns: Sequence[DrawnTurn]) -> None:
        """Run an episode for the fields of a `Row`; it is given `turns` before it draws others."""
        self._episodes[number] = episode = _Episode(number, row, [*turns])
        self._queue.append(episode)

    def answer(self, number: int, turn: DrawnTurn) -> None:
        """Give an episode the turn that it wanted."""
        episode = self._episodes[number]
        assert episode.wanted is not None and episode.process is not None, "it waits for a turn"
        episode.turns, episode.wanted = [*episode.turns[: episode.wanted.turn], turn], None
        episode.process.send("drawn", {"number": episode.key, "turn": turn.__dict__})

    def drop(self, numbers: Iterable[int]) -> None:
        """End episodes."""
        for number in numbers:
            if (episode := self._episodes.pop(number, None)) is None:
                continue
            if episode.process is None:
                self._queue.remove(episode)
            else:
                del episode.process.running[episode.key]
                episode.process.send("drop", episode.key)

    def events(self, timeout_s: float = 0.0) -> list[Wanted | Ended]:
        """Return what episodes want and which have ended since the last call; wait up to a limit for something."""
        self._fill()
        events: list[Wanted | Ended] = []
        ready, _, _ = select.select([one.guarded.channel for one in self._processes], [], [], timeout_s)
        for place, process in enumerate(self._processes):
            if process.guarded.channel in ready:
                events += self._read(place, process)
            elif process.is_stuck:
                self._replace(place, process, None, "its process did not react, and was ended")
        for episode in [*self._episodes.values()]:
            late_s = time.monotonic() - episode.begun_s - self._limits.deadline_s
            if episode.process is not None and late_s > GRACE_S:
                episode.process.is_stuck = True
                self._fail(episode, "deadline", f"it went on after deadline_s={self._limits.deadline_s:g} s")
        events += self._ended
        self._ended = []
        return events

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.guarded.close()
        self._processes = []

    # ---- processes ----

    def _started(self) -> _Process:
        section = self._section
        assert section.function is not None, "checked with the configuration"
        if section.addresses:
            assert section.key_file is not None, "checked with the configuration"
            process = _Process(RemoteProcess(section.addresses, read_key(section.key_file)))
        else:
            process = _Process(GuardedProcess(SERVER, section.function, "episodes", section.python))
        content = {
            "path": section.function,
            "limits": self._limits.__dict__,
            "options": section.options,
            "tokenizer": self._tokenizer,
            "memory_bytes": section.memory_bytes,
        }
        process.send("load", content)
        process.guarded.channel.settimeout(self._start_timeout_s)
        key = f"rollout.episode.function={section.function}"
        try:
            kind, text = json.loads(_received_line(process))
        except (TimeoutError, EOFError, ConnectionError) as error:
            late = isinstance(error, TimeoutError)
            how = f"did not load within {self._start_timeout_s:g} s" if late else process.guarded.end_text()
            process.guarded.close()
            raise DataError(
                f"{key}, while it was loaded: its process {how}; correct the module, or raise timeouts.start_s"
            ) from None
        if kind != "loaded":
            process.guarded.close()
            raise DataError(f"{key} {text}")
        process.guarded.note_group()
        process.guarded.channel.settimeout(SEND_TIMEOUT_S)
        return process

    def _fill(self) -> None:
        """Begin queued episodes, each on the process with the fewest."""
        free = self._section.max_running - sum(len(one.running) for one in self._processes)
        while self._queue and free > 0:
            episode = self._queue.popleft()
            process = min(self._processes, key=lambda one: len(one.running))
            episode.key = next(self._keys)
            process.running[episode.key] = episode
            episode.process, episode.begun_s, episode.wanted = process, time.monotonic(), None
            recorded = [turn.__dict__ for turn in episode.turns]
            process.send("begin", {"number": episode.key, "row": episode.row, "recorded": recorded})
            free -= 1

    def _read(self, place: int, process: _Process) -> list[Wanted | Ended]:
        """Return what a process says; start another one in its place if it has ended."""
        events: list[Wanted | Ended] = []
        try:
            part = process.guarded.channel.recv(2**20)
        except OSError:  # of TCP: also TimeoutError, for a host that has gone without a word
            part = b""
        process.received += part
        *lines, rest = process.received.split(b"\n")
        process.received = rest
        for text in lines:
            kind, content = json.loads(text)
            if kind == "blocked":
                self._replace(place, process, content["number"], content["text"])
                return events
            event = Wanted(**content) if kind == "wanted" else Ended(**content)
            if (episode := process.running.get(event.number)) is None:
                continue  # dropped since
            event = replace(event, number=episode.number)
            if isinstance(event, Wanted):
                episode.wanted, episode.turns = event, episode.turns[: event.turn]
            else:
                self._forget(episode)
            events.append(event)
        if not part or len(rest) > LINE_BYTES:
            self._replace(place, process, None, f"its process {process.guarded.end_text()}")
        return events

    def _replace(self, place: int, process: _Process, culprit: int | None, text: str) -> None:
        """End a process, start another one, and run its episodes again; one that kept the others from running fails."""
        process.guarded.close()
        _logger.warning("rollout.episode: %s; %d episodes begin again", text, len(process.running))
        episodes = [*process.running.values()]
        process.running.clear()
        self._processes[place] = self._started()
        for episode in episodes:
            episode.process = None
            episode.num_starts += culprit is None
            if episode.key == culprit:
                self._fail(episode, "blocked", text)
            elif episode.num_starts >= MOST_STARTS:
                self._fail(episode, "process", f"{text}, {MOST_STARTS} times under it")
            else:
                self._queue.appendleft(episode)

    def _fail(self, episode: _Episode, kind: str, text: str) -> None:
        if episode.process is not None:
            episode.process.send("drop", episode.key)
        self._forget(episode)
        self._ended.append(Ended(episode.number, kind=kind, text=text, turn=len(episode.turns)))

    def _forget(self, episode: _Episode) -> None:
        del self._episodes[episode.number]
        if episode.process is not None:
            del episode.process.running[episode.key]


def check_episode(section: EpisodeSection, start_timeout_s: float = 60.0) -> None:
    """Load a section's function as a run does, and end its process; raise DataError for an unusable one."""
    one = section.model_copy(update={"num_processes": 1})
    episodes = Episodes(one, Limits(1, 1, 1, 1.0, 60.0), None, start_timeout_s)
    try:
        episodes.start()
    finally:
        episodes.close()


def _received_line(process: _Process) -> bytes:
    while b"\n" not in process.received:
        part = process.guarded.channel.recv(2**20)
        if not part:
            raise EOFError
        process.received += part
    text, _, rest = process.received.partition(b"\n")
    process.received = rest
    return bytes(text)
