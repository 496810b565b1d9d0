"""Processes that run the episodes of an engine: what they ask for and are given, and what happens when one ends."""

from __future__ import annotations

import itertools
import json
import logging
import select
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridengine.config.episode_section import EpisodeSection
from hybridengine.episodes.process import Episode, Process, Starter
from hybridengine.episodes.wire import DrawnTurn, Ended, Limits, Wanted

MOST_ENDS = 2
"""Ends of processes in which an episode was alone, at which it fails: a single one may have had another reason."""
GRACE_S = 30.0
"""Time after its deadline in which an episode ends by itself."""
PING_S = 1.0
"""Time after which a process that says nothing is asked whether it runs."""
SILENT_GRACE_S = 10.0
"""Time beyond `blocked_s` in which it answers, also on a busy machine."""
LINE_BYTES = 2**26
"""Longest line of a process."""

_logger = logging.getLogger(__name__)


class Episodes:
    """Episodes of one engine, on one rank; numbers are those of their responses.

    An episode whose process ends is run again in a new one, and given the turns that it had. If one of a process's
    episodes may have ended it, these are suspects: they run in two groups, each alone in a process. The group that ends
    its process is halved again, until an episode that is alone ends its process, and fails.
    """

    def __init__(
        self, section: EpisodeSection, limits: Limits, tokenizer: str | None, start_timeout_s: float = 600.0
    ) -> None:
        self._section, self._limits = section, limits
        self._starter = Starter(section, limits, tokenizer, start_timeout_s)
        self._processes: list[Process] = []
        self._episodes: dict[int, Episode] = {}
        self._queue = deque[Episode]()
        """Episodes that have not begun, or that begin again and are no suspects."""
        self._suspects = deque[list[Episode]]()
        """Groups that wait for an idle process."""
        self._keys = itertools.count()
        self._ended: list[Ended] = []
        self._listened_s = time.monotonic()

    def start(self) -> None:
        """Start the processes; raise DataError if the function cannot be loaded in time."""
        self._processes = [self._starter.start() for _ in range(self._section.num_processes)]

    def __len__(self) -> int:
        return len(self._episodes)

    def begin(self, number: int, row: Mapping[str, Any], turns: Sequence[DrawnTurn]) -> None:
        """Run an episode for the fields of a `Row`; it is given `turns` before it draws others."""
        self._episodes[number] = episode = Episode(number, row, [*turns])
        self._queue.append(episode)

    def answer(self, number: int, turn: DrawnTurn) -> None:
        """Give an episode the turn that it wanted, now or once it has begun again and asks for it."""
        episode = self._episodes[number]
        assert episode.wanted is not None, "a turn was drawn for it"
        episode.turns, episode.wanted = [*episode.turns[: episode.wanted.turn], turn], None
        if episode.is_waiting:
            self._send_turn(episode, len(episode.turns) - 1)

    def drop(self, numbers: Iterable[int]) -> None:
        """End episodes."""
        for number in numbers:
            if (episode := self._episodes.pop(number, None)) is None:
                continue
            if episode.process is not None:
                del episode.process.running[episode.key]
                episode.process.send("drop", episode.key)
            elif episode in self._queue:
                self._queue.remove(episode)
            else:
                groups = ([one for one in group if one is not episode] for group in self._suspects)
                self._suspects = deque(group for group in groups if group)

    def events(self, timeout_s: float = 0.0) -> list[Wanted | Ended]:
        """Return what episodes want and which have ended since the last call; wait up to a limit for something.

        A turn that is wanted is not wanted again by an episode that begins again, unless it adds other tokens before it.
        """
        self._fill()
        events: list[Wanted | Ended] = []
        poll = select.poll()  # `select.select` refuses file descriptors from 1024 on
        for process in self._processes:
            poll.register(process.guarded.channel, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}
        now_s = time.monotonic()
        # Not all of the time in which this rank did something else, or the machine was stopped.
        passed_s, self._listened_s = min(now_s - self._listened_s, SILENT_GRACE_S), now_s
        for process in [*self._processes]:
            if process.guarded.channel.fileno() in ready:
                events += self._read(process)
            elif process.is_stuck:
                self._replace(process, "its process did not react, and was ended", has_suspects=True)
            else:
                self._note_silence(process, passed_s)
        self._end_late()
        events += self._ended
        self._ended = []
        return events

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.guarded.close()
        self._processes = []

    # ---- processes ----

    def _fill(self) -> None:
        """Begin groups of suspects on idle processes, then queued episodes, each on the process with the fewest."""
        for process in [one for one in self._processes if one.is_worn and not one.running]:
            process.guarded.close()
            self._processes.remove(process)
        usable = [one for one in self._processes if not (one.is_stuck or one.is_worn)]
        for process in usable:
            if not process.running:
                process.is_reserved = bool(self._suspects)
                for episode in self._suspects.popleft() if self._suspects else ():
                    self._begin(process, episode)
        shared = [one for one in usable if not one.is_reserved]
        taken = sum(len(one.running) for one in self._processes) + sum(map(len, self._suspects))
        while shared and self._queue and taken < self._section.max_running:
            self._begin(min(shared, key=lambda one: len(one.running)), self._queue.popleft())
            taken += 1

    def _begin(self, process: Process, episode: Episode) -> None:
        episode.key = next(self._keys)
        process.running[episode.key] = episode
        episode.process, episode.begun_s, episode.is_waiting = process, time.monotonic(), False
        recorded = [turn.__dict__ for turn in episode.turns]
        process.send("begin", {"number": episode.key, "row": episode.row, "recorded": recorded})

    def _send_turn(self, episode: Episode, number: int) -> None:
        assert episode.process is not None, "it has asked for the turn"
        episode.is_waiting = False
        drawn = {"number": episode.key, "turn": number, "drawn": episode.turns[number].__dict__}
        episode.process.send("drawn", drawn)

    def _end_late(self) -> None:
        """Fail episodes that their processes have not ended at their deadline, and replace these processes.

        The episodes of a process that is silent are not all at fault: `_note_silence` finds the one that is.
        """
        latest_s = time.monotonic() - self._limits.deadline_s - GRACE_S
        for process in [*self._processes]:
            if process.silent_s >= PING_S:
                continue
            late = [one for one in process.running.values() if one.begun_s < latest_s]
            for episode in late:
                self._fail(episode, "deadline", f"it went on after deadline_s={self._limits.deadline_s:g} s")
            if late:
                text = "its process did not end an episode at its deadline, and was ended"
                self._replace(process, text, has_suspects=False)

    def _note_silence(self, process: Process, passed_s: float) -> None:
        """Ask a silent process for a line; replace one that has not answered for `blocked_s` and a grace.

        Code that holds Python's lock (GIL) keeps all of its process's threads from running, and so from answering.
        """
        before_s, process.silent_s = process.silent_s, process.silent_s + passed_s
        if before_s < PING_S <= process.silent_s:
            process.send("ping", None)
        elif process.silent_s >= PING_S + self._limits.blocked_s + SILENT_GRACE_S:
            text = (
                f"its process did not answer for {process.silent_s:.0f} s (blocked_s={self._limits.blocked_s:g}), as when"
                " code that awaits nothing holds Python's lock (a regular expression does), and was ended; call such"
                " code by run_process"
            )
            self._replace(process, text, has_suspects=True, kind="blocked")

    def _read(self, process: Process) -> list[Wanted | Ended]:
        """Return what a process says; start another one in its place if it has ended."""
        events: list[Wanted | Ended] = []
        try:
            part = process.guarded.channel.recv(2**20)
        except OSError:  # of TCP: also TimeoutError, for a host that has gone without a word
            part = b""
        process.silent_s = 0.0
        process.received += part
        *lines, rest = process.received.split(b"\n")
        process.received = rest
        for text in lines:
            kind, content = json.loads(text)
            if kind == "blocked":
                self._end_blocked(process, **content)
                return events
            if kind == "alive":
                continue
            if kind == "worn":
                self._retire(process)
                continue
            event = Wanted(**content) if kind == "wanted" else Ended(**content)
            if (episode := process.running.get(event.number)) is None:
                continue  # dropped since
            event = replace(event, number=episode.number)
            if isinstance(event, Ended):
                self._forget(episode)
                events.append(event)
            elif self._is_new(episode, event):
                events.append(event)
        if not part or len(rest) > LINE_BYTES:
            text = f"its process {process.guarded.end_text()}"
            self._replace(process, text, has_suspects=True)
        return events

    def _is_new(self, episode: Episode, wanted: Wanted) -> bool:
        """Note the turn that an episode waits for; return False if an earlier start of it has asked for the same turn."""
        episode.is_waiting = True
        if wanted == episode.wanted:
            return False
        if episode.wanted is None and wanted.turn < len(episode.turns):
            turn = episode.turns[wanted.turn]
            if turn.added == wanted.added:  # drawn after this start was given its turns
                self._send_turn(episode, wanted.turn)
                return False
        episode.wanted, episode.turns = wanted, episode.turns[: wanted.turn]
        return True

    def _end_blocked(self, process: Process, number: int | None, text: str) -> None:
        """Fail the episode that keeps the others of its process from running, and replace the process.

        The process does not know which it is (None) if the code of a task is at fault that an episode has started.
        """
        if number in process.running:
            self._fail(process.running[number], "blocked", text)
        self._replace(process, text, has_suspects=number is None, kind="blocked")

    def _retire(self, process: Process) -> None:
        """Start another process for new episodes in place of a worn one, which keeps those that it has.

        Without effect while as many worn processes run as others: the process will say again that it is worn.
        """
        if process.is_worn or len(self._processes) >= 2 * self._section.num_processes:
            return
        _logger.warning(
            "rollout.episode: calls in threads (asyncio.to_thread) go on long after their episodes have ended; new"
            " episodes begin in another process"
        )
        process.is_worn = True
        self._processes.append(self._starter.start())

    def _replace(self, process: Process, text: str, *, has_suspects: bool, kind: str = "process") -> None:
        """End a process, start another one in its place, and run its episodes again.

        Args:
            has_suspects: True if one of the episodes may be the reason, and it is not known which.
            kind: failure of an episode that is the reason.
        """
        process.guarded.close()
        episodes = [*process.running.values()]
        told = "with %d episodes in it" if has_suspects else "%d other episodes begin again"
        _logger.warning(f"rollout.episode: %s, {told}", text, len(episodes))
        process.running.clear()
        for episode in episodes:
            episode.process, episode.is_waiting = None, False
        self._processes.remove(process)
        if not process.is_worn:
            self._processes.append(self._starter.start())
        if has_suspects and len(episodes) == 1:
            self._end_alone(episodes[0], kind, text)
        elif has_suspects:
            half = len(episodes) // 2
            self._suspects += [group for group in (episodes[:half], episodes[half:]) if group]
        elif process.is_reserved and episodes:
            self._suspects.append(episodes)
        else:
            self._queue.extendleft(reversed(episodes))

    def _end_alone(self, episode: Episode, kind: str, text: str) -> None:
        """Fail an episode that was alone in its process when this ended, or let it begin again, alone."""
        episode.num_ends += 1
        if episode.num_ends < MOST_ENDS:
            self._suspects.append([episode])
        else:
            self._fail(episode, kind, f"{text}, {MOST_ENDS} times with no other episode in it")

    def _fail(self, episode: Episode, kind: str, text: str) -> None:
        self._forget(episode)
        self._ended.append(Ended(episode.number, kind=kind, text=text, turn=len(episode.turns)))

    def _forget(self, episode: Episode) -> None:
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
