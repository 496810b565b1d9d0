"""A generation engine as the simulation knows it: responses under way, seconds, and whose policy each token comes from.

An engine advances all its responses by a token a step, whose seconds depend on how many they are and on how many tokens
they have. Until a response begins or ends, or weights arrive, nothing about it changes: a span of steps is one event.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

StepSeconds = Callable[[float, float], float]
"""Seconds of an engine's step: responses that run, and tokens that they have altogether, prompts included."""


@dataclass(frozen=True)
class Done:
    """A complete response: which policy each run of its tokens comes from."""

    length: int
    versions: tuple[tuple[int, int], ...]
    """(version, tokens)."""


@dataclass(order=True)
class _Running:
    """A response under way: the engine's step count at which it ends comes first, for a heap."""

    end: int
    number: int
    begin: int = field(compare=False)
    length: int = field(compare=False)


class SimulatedEngine:
    """One engine; time advances from event to event.

    Args:
        prompt_tokens: that each response has before its own.
        prefill_s: of one prompt, which the engine spends before the response begins.
        update_s: for which it stops to take new weights.
    """

    def __init__(self, step_s: StepSeconds, prompt_tokens: float, prefill_s: float, update_s: float) -> None:
        self._seconds_of, self._prompt_tokens = step_s, prompt_tokens
        self._prefill_s, self._update_s = prefill_s, update_s
        self.now_s = 0.0
        self.steps = 0
        self.running: list[_Running] = []
        self._begun_sum = 0
        self._changes, self._versions = [0], [0]
        self._has_weights_s = 0.0
        self.busy_s = 0.0
        self.idle_s = 0.0
        self.pending_version: int | None = None

    def begin(self, number: int, length: int) -> None:
        """Start a response, after its prompt."""
        heapq.heappush(self.running, _Running(self.steps + length, number, self.steps, length))
        self._begun_sum += self.steps
        self.now_s += self._prefill_s
        self.busy_s += self._prefill_s

    def take_weights(self, version: int, now_s: float) -> None:
        """Stop for new weights, between two tokens; where weights are still on their way, these come instead."""
        self.pending_version = None
        if self._has_weights_s > now_s and self._changes[-1] == self.steps:
            self._versions[-1] = version
            return
        self.now_s += self._update_s
        self.idle_s += self._update_s
        self._has_weights_s = self.now_s
        self._changes.append(self.steps)
        self._versions.append(version)

    def wait(self, until_s: float) -> None:
        """Do nothing until a moment, where there is nothing to do."""
        if not self.running and self.now_s < until_s:
            self.idle_s += until_s - self.now_s
            self.now_s = until_s

    def stop(self, now_s: float) -> None:
        """Count what it does up to the end of the run, and nothing beyond."""
        beyond = self.now_s - now_s
        if beyond <= 0:
            if self.running:  # in the middle of a token
                self.busy_s -= beyond
            else:
                self.idle_s -= beyond
        else:
            idle = min(beyond, max(0.0, self._has_weights_s - now_s), self._update_s)
            self.idle_s -= idle
            self.busy_s -= beyond - idle
        self.now_s = now_s

    def next_end_s(self) -> float:
        """When the next response ends, if nothing happens before."""
        if not self.running:
            return float("inf")
        return self.now_s + (self.running[0].end - self.steps) * self._step_s(self.running[0].end)

    def advance(self, until_s: float) -> Iterator[Done]:
        """Work until a moment, and to the end of the token that is then under way; complete responses come out."""
        while self.running and self.now_s < until_s:
            end = self.running[0].end
            step_s = self._step_s(end)
            whole = end - self.steps
            fit = min(whole, max(1, math.ceil((until_s - self.now_s) / step_s - 1e-9)))
            self.steps += fit
            self.now_s += fit * step_s
            self.busy_s += fit * step_s
            while self.running and self.running[0].end == self.steps:
                one = heapq.heappop(self.running)
                self._begun_sum -= one.begin
                yield Done(one.length, self._versions_of(one))
            if fit < whole:
                return
        self.wait(until_s)

    def _step_s(self, end: int) -> float:
        """Seconds of a step until the next end, with the tokens that there are halfway."""
        count = len(self.running)
        made = count * (self.steps + end) / 2 - self._begun_sum
        return self._seconds_of(count, count * self._prompt_tokens + made)

    def _versions_of(self, one: _Running) -> tuple[tuple[int, int], ...]:
        first = bisect_right(self._changes, one.begin) - 1
        found, at = [], one.begin
        for place in range(first, len(self._changes)):
            end = self._changes[place + 1] if place + 1 < len(self._changes) else one.end
            end = min(end, one.end)
            if end > at:
                found.append((self._versions[place], end - at))
                at = end
        return tuple(found)
