"""What every role is doing now, from the calls that its ranks have got and have ended.

Ranks take their calls in the order in which they were made, and a call begins when its rows exist. So a rank is in its
first call that has not ended, unless a call that produces rows for it has not: then it waits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Place = tuple[str, int]
"""Pool and rank."""


@dataclass
class _Call:
    """A call that has not ended on all ranks."""

    role: str
    method: str
    num_ranks: int
    ready_s: float
    """When it was made, or later its rows were there."""
    places: set[Place]
    """That have not ended it."""
    inputs: set[int] = field(default_factory=set)
    """Calls that have not ended and whose rows it reads."""


@dataclass(frozen=True)
class RoleProgress:
    """A role at a moment."""

    role: str
    num_done: int
    """Calls of this step that all ranks have ended."""
    num_made: int
    """Calls of this step so far."""
    method: str | None = None
    """What its ranks are in, or what they wait to begin; None where there is nothing to do."""
    since_s: float | None = None
    """For how long; None where no rank has begun."""
    num_busy: int = 0
    """Ranks that are in the method."""
    num_ranks: int = 0
    """Ranks that have got it."""

    @property
    def is_busy(self) -> bool:
        return self.num_busy > 0


class CallProgress:
    """The calls under way; told of them from any thread, and read from any.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._queues: dict[Place, deque[int]] = {}
        self._free_s: dict[Place, float] = {}
        self._roles: dict[str, None] = {}
        self._made, self._done = Counter[str](), Counter[str]()

    def begin_step(self) -> None:
        """Count calls from here on; those under way count as well."""
        with self._lock:
            self._done.clear()
            self._made = Counter(call.role for call in self._calls.values())

    def call_made(
        self, number: int, role: str, method: str, pool: str, num_ranks: int, inputs: Sequence[int]
    ) -> None:
        """All ranks of a pool have got a call; `inputs` are numbers of the calls whose rows it reads."""
        with self._lock:
            self._roles[role] = None
            self._made[role] += 1
            places = [(pool, rank) for rank in range(num_ranks)]
            missing = {earlier for earlier in inputs if earlier in self._calls}
            self._calls[number] = _Call(role, method, num_ranks, self._clock(), set(places), missing)
            for place in places:
                self._queues.setdefault(place, deque()).append(number)

    def rank_ended(self, number: int, pool: str, rank: int) -> None:
        """A rank has ended a call; one that nobody has told of is passed over."""
        with self._lock:
            call, place = self._calls.get(number), (pool, rank)
            if call is None or place not in call.places:
                return
            now = self._clock()
            call.places.discard(place)
            self._queues[place].remove(number)
            self._free_s[place] = now
            if call.places:
                return
            del self._calls[number]
            self._done[call.role] += 1
            for other in self._calls.values():
                if number in other.inputs:
                    other.inputs.discard(number)
                    other.ready_s = now

    def read(self) -> list[RoleProgress]:
        """Every role that has been called, in the order of their first calls."""
        with self._lock:
            now = self._clock()
            busy = self._busy()
            first = {call.role: number for number, call in reversed(self._calls.items())}
            found = []
            for role in self._roles:
                counts = role, self._done[role], self._made[role]
                running = [number for number in busy if self._calls[number].role == role]
                if running:
                    begun = {number: min(busy[number]) for number in running}
                    number = min(running, key=begun.__getitem__)
                    call, num_busy = self._calls[number], len(busy[number])
                    since_s = max(0.0, now - begun[number])
                    found.append(RoleProgress(*counts, call.method, since_s, num_busy, call.num_ranks))
                elif role in first:
                    call = self._calls[first[role]]
                    found.append(RoleProgress(*counts, call.method, num_ranks=call.num_ranks))
                else:
                    found.append(RoleProgress(*counts))
            return found

    def _busy(self) -> dict[int, list[float]]:
        """Call -> when each rank that is in it began."""
        found: dict[int, list[float]] = {}
        for place, queue in self._queues.items():
            if queue and not self._calls[queue[0]].inputs:
                began_s = max(self._calls[queue[0]].ready_s, self._free_s.get(place, 0.0))
                found.setdefault(queue[0], []).append(began_s)
        return found
