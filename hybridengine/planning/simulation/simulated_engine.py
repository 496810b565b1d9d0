"""Simulated generation engine, with its running responses, its time, and the policy version of each token.

An engine advances all its responses by one token per step. The seconds of a step depend on the number of responses and of
their tokens. Until a response begins or ends, or weights arrive, nothing else changes, so a span of steps is one event.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise

StepSeconds = Callable[[float, float], float]
"""Function that returns the seconds of a step from the running responses and their total tokens, including prompts."""
Response = tuple[tuple[int, int], ...]
"""Complete response as spans of tokens of one policy each: (version of the policy, number of tokens)."""


class SimulatedEngine:
    """One engine, whose time advances from event to event.

    Args:
        prompt_tokens: number of prompt tokens of each response.
        prefill_s: seconds of the prefill of one prompt, before its response begins.
        update_s: seconds for which the engine pauses to receive new weights.
    """

    def __init__(self, step_s: StepSeconds, prompt_tokens: float, prefill_s: float, update_s: float) -> None:
        self._seconds_of, self._prompt_tokens = step_s, prompt_tokens
        self._prefill_s, self._update_s = prefill_s, update_s
        self.now_s = 0.0
        self.running: list[
            tuple[int, int]
        ] = []  # heap of (step at which a response ends, step at which it began)
        self._steps, self._begun_sum = 0, 0
        self._changes, self._versions = [0], [0]
        self._has_weights_s = 0.0
        self._idle_s = 0.0

    def begin(self, length: int) -> None:
        """Start a response after the prefill of its prompt."""
        heapq.heappush(self.running, (self._steps + length, self._steps))
        self._begun_sum += self._steps
        self.now_s += self._prefill_s

    def take_weights(self, version: int, now_s: float) -> None:
        """Pause for new weights between two tokens; they replace weights that are still being received."""
        if self._has_weights_s > now_s and self._changes[-1] == self._steps:
            self._versions[-1] = version
            return
        self.now_s += self._update_s
        self._idle_s += self._update_s
        self._has_weights_s = self.now_s
        self._changes.append(self._steps)
        self._versions.append(version)

    def wait(self, until_s: float) -> None:
        """Wait until a moment if no response is running."""
        if not self.running and self.now_s < until_s:
            self._idle_s += until_s - self.now_s
            self.now_s = until_s

    def idle_s(self, end_s: float) -> float:
        """Return the seconds spent without a response or receiving weights, up to the end of the run."""
        return self._idle_s - min(self._update_s, max(0.0, self._has_weights_s - end_s))

    def next_end_s(self) -> float:
        """Return the moment at which the next response ends, if no other event comes first."""
        end = self.running[0][0]
        return self.now_s + (end - self._steps) * self._step_s(end)

    def advance(self, until_s: float) -> Iterator[Response]:
        """Work until a moment, finish the step in progress, and yield the responses that complete."""
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
        """Return the mean seconds of a step until step `end`, computed with the number of tokens at the halfway point."""
        count = len(self.running)
        made = count * (self._steps + end) / 2 - self._begun_sum
        return self._seconds_of(count, count * self._prompt_tokens + made)

    def _response(self, begin: int) -> Response:
        """Return the response that began at step `begin` and ends now."""
        first = bisect_right(self._changes, begin) - 1
        marks = pairwise([begin, *self._changes[first + 1 :], self._steps])
        return tuple(
            (version, end - start)
            for version, (start, end) in zip(self._versions[first:], marks, strict=True)
            if end > start
        )
