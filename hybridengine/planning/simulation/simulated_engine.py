"""A generation engine as the simulation knows it: responses under way, seconds, and whose policy each token comes from.

An engine advances all its responses by a token a step, whose seconds depend on how many they are and on how many tokens
they have. Until a response begins or ends, or weights arrive, nothing about it changes: a span of steps is one event.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise

StepSeconds = Callable[[float, float], float]
"""Seconds of an engine's step: responses that run, and tokens that they have altogether, prompts included."""
Response = tuple[tuple[int, int], ...]
"""A complete response as runs of tokens of one policy each: (version of the policy, tokens)."""


class SimulatedEngine:
    """One engine; time advances from event to event.

    Args:
        prompt_tokens: tokens that each response has before its own.
        prefill_s: seconds of one prompt, which the engine spends before the response begins.
        update_s: seconds for which the engine stops to take new weights.
    """

    def __init__(self, step_s: StepSeconds, prompt_tokens: float, prefill_s: float, update_s: float) -> None:
        self._seconds_of, self._prompt_tokens = step_s, prompt_tokens
        self._prefill_s, self._update_s = prefill_s, update_s
        self.now_s = 0.0
        self.running: list[
            tuple[int, int]
        ] = []  # a heap: steps at which a response ends, and at which it began
        self._steps, self._begun_sum = 0, 0
        self._changes, self._versions = [0], [0]
        self._has_weights_s = 0.0
        self._idle_s = 0.0

    def begin(self, length: int) -> None:
        """Start a response, after its prompt."""
        heapq.heappush(self.running, (self._steps + length, self._steps))
        self._begun_sum += self._steps
        self.now_s += self._prefill_s

    def take_weights(self, version: int, now_s: float) -> None:
        """Stop for new weights, between two tokens; they replace weights that are still on their way."""
        if self._has_weights_s > now_s and self._changes[-1] == self._steps:
            self._versions[-1] = version
            return
        self.now_s += self._update_s
        self._idle_s += self._update_s
        self._has_weights_s = self.now_s
        self._changes.append(self._steps)
        self._versions.append(version)

    def wait(self, until_s: float) -> None:
        """Wait until a moment if there is nothing to generate."""
        if not self.running and self.now_s < until_s:
            self._idle_s += until_s - self.now_s
            self.now_s = until_s

    def idle_s(self, end_s: float) -> float:
        """Return the seconds without a response, or with new weights on their way, up to the end of the run."""
        return self._idle_s - min(self._update_s, max(0.0, self._has_weights_s - end_s))

    def next_end_s(self) -> float:
        """Return the moment at which the next response ends, if nothing happens before."""
        end = self.running[0][0]
        return self.now_s + (end - self._steps) * self._step_s(end)

    def advance(self, until_s: float) -> Iterator[Response]:
        """Work until a moment, and to the end of the token that is then under way; yield complete responses."""
        while self.running and self.now_s < until_s:
            end = self.running[0][0]
            step_s = self._step_s(end)
            steps = min(end - self._steps, max(1, math.ceil((until_s - self.now_s) / step_s - 1e-9)))
            self._steps += steps
            self.now_s += steps * step_s
            while self.running and self.running[0][0] == self._steps:
                _, begin = heapq.heappop(self.running)
                self._begun_sum -= begin
                yield self._response(begin)
            if self._steps < end:
                return
        self.wait(until_s)

    def _step_s(self, end: int) -> float:
        """Return the seconds of a step until the next end, with the tokens that there are halfway."""
        count = len(self.running)
        made = count * (self._steps + end) / 2 - self._begun_sum
        return self._seconds_of(count, count * self._prompt_tokens + made)

    def _response(self, begin: int) -> Response:
        """Return the response that began at a step and ends now."""
        first = bisect_right(self._changes, begin) - 1
        marks = pairwise([begin, *self._changes[first + 1 :], self._steps])
        return tuple(
            (version, end - start)
            for version, (start, end) in zip(self._versions[first:], marks, strict=True)
            if end > start
        )
