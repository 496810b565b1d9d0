"""Deterministic discrete-event simulation of training runs: engines, a queue of responses, a trainer, weight updates.

    synchronous    all devices generate a batch, then all train on it: nothing is begun ahead
    asynchronous   some devices generate all the time, the others train; after each optimizer step the engines receive
                   new weights, between two tokens

An event is the end of a response or of an optimizer step. An engine advances all its responses by one token per step, and
the seconds of a step depend on the number of responses and of their tokens; until a response begins or ends, or weights
arrive, nothing else changes, so a span of steps is one event. Where engines take several steps per call, responses begin,
and those that have ended and new weights arrive, between two calls.

A response is begun only while floor((N_r - 1) / B) <= i + eta, so that the responses begun, N_r, are at most eta batches
ahead of the trainer's step i (AReaL, arXiv 2505.24298, section 5.1). None is begun once all responses that the run trains
on are complete: engines that are far ahead then wait, and the cost of a simulation does not grow with their number.

The gate alone bounds no token's age: a long response is overtaken by later ones. Two bounds are exact. Under `token`, a
batch is made of the prompt groups that ended first, and tokens older than eta are masked. Under `response`, batch i is
made of the responses B·i to B·(i + 1) - 1, for which the trainer waits: they were begun with version i - eta or later.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from hybridengine.planning.costs.lengths import Lengths

StepSeconds = Callable[[float, float], float]
"""Function that returns the seconds of a step from the running responses and their total tokens, including prompts."""
Bound = Literal["token", "response"]
Spans = tuple[tuple[int, int], ...]
"""Tokens of a complete response, in spans of one policy each: (version of the policy, number of tokens)."""
Response = tuple[int, Spans]
"""Complete response: (number in the order of submission, its tokens)."""
TRAINER, ARRIVAL = -1, -2
"""Owners of events that do not belong to an engine."""


@dataclass(frozen=True)
class Setting:
    num_steps: int
    batch_size: int
    """Number of responses in a batch."""
    num_engines: int
    max_running: int
    """Largest number of responses that an engine advances at once."""
    prompt_tokens: float
    lengths: Lengths
    step_s: StepSeconds
    prefill_s: float
    """Seconds of the prefill of one prompt, before its response begins."""
    train_token_s: float
    """Seconds of training per token of a batch, prompts included."""
    update_s: float
    """Seconds for which an engine pauses to receive weights; in a synchronous run, of the switch in both directions."""
    max_staleness: float = 1.0
    """Number of batches that may be begun ahead of the trainer, and largest age of a token; infinite for no bound."""
    bound: Bound = "token"
    """Batches and masks that keep tokens young: see the docstring of this module."""
    samples_per_prompt: int = 1
    """Number of responses in a prompt group, a divisor of `batch_size`; groups are trained on as a whole."""
    seed: int = 0
    steps_per_call: int = 1
    """Number of steps that an engine takes before responses and weights come and go."""
    call_s: float = 0.0
    """Seconds for which an engine is idle before each call: one that takes steps, or one that begins responses."""


@dataclass(frozen=True)
class Outcome:
    step_ages: list[Mapping[int, int]]
    """For each step, the number of its response tokens by staleness: optimizer steps from the policy of a token to the
    one trained on it. Includes masked tokens."""
    max_staleness: float
    """The bound: older tokens are masked."""
    train_busy_s: float
    generate_idle_s: float
    """Total seconds of all engines without a response, between two calls, or receiving weights."""
    queue: list[tuple[float, int]]
    """(seconds, complete responses that wait for the trainer) at every change."""
    step_ends: list[float]
    num_engines: int

    @property
    def seconds(self) -> float:
        return self.step_ends[-1]

    @property
    def staleness_counts(self) -> Mapping[int, int]:
        """Number of response tokens by staleness."""
        total = sum(map(Counter, self.step_ages), Counter[int]())
        return dict(sorted(total.items()))

    @property
    def tokens(self) -> int:
        return sum(self.staleness_counts.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def masked_share(self) -> float:
        """Share of the tokens that are older than the bound."""
        masked = sum(count for age, count in self.staleness_counts.items() if age > self.max_staleness)
        return masked / max(1, self.tokens)

    @property
    def train_idle_share(self) -> float:
        """Share of the run in which the trainer waits for responses."""
        return 1.0 - self.train_busy_s / self.seconds

    @property
    def generate_idle_share(self) -> float:
        """Share of the engines' time in which they do not generate."""
        return self.generate_idle_s / (self.seconds * self.num_engines)

    @property
    def mean_staleness(self) -> float:
        return sum(lag * count for lag, count in self.staleness_counts.items()) / max(1, self.tokens)

    @property
    def largest_staleness(self) -> int:
        return max(self.staleness_counts)


def _lengths(setting: Setting) -> Iterator[int]:
    generator = np.random.default_rng(setting.seed)
    while True:
        yield from setting.lengths.sample(generator, 4096).tolist()


def simulate_asynchronous(setting: Setting) -> Outcome:
    """Simulate engines and a trainer that work at the same time."""
    return _Simulation(setting).run()


def simulate_synchronous(setting: Setting) -> Outcome:
    """Simulate engines and a trainer that take turns; each batch, even the first, begins with a switch (`update_s`)."""
    simulation = _Simulation(replace(setting, max_staleness=0.0))
    for engine in simulation.engines:
        engine.take_weights(0, 0.0)
    return simulation.run()


class _Engine:
    """One engine, with its running responses, its time, and the policy version of each token."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self.now_s = setting, 0.0
        # Running responses: (step at which one ends, step at which it began, number), ascending.
        self.running: list[tuple[int, int, int]] = []
        self._steps, self._begun_sum = 0, 0
        self._changes, self._versions = [0], [0]
        self._has_weights_s = 0.0
        self._idle_s = 0.0

    def begin(self, number: int, length: int) -> None:
        """Start a response after the prefill of its prompt."""
        insort(self.running, (self._steps + length, self._steps, number))
        self._begun_sum += self._steps
        self.now_s += self._setting.prefill_s

    def pause(self, seconds: float) -> None:
        """Stay idle for some time."""
        self.now_s += seconds
        self._idle_s += seconds

    def take_weights(self, version: int, now_s: float) -> None:
        """Pause for new weights between two calls; they replace weights that are still being received."""
        if self._has_weights_s > now_s and self._changes[-1] == self._steps:
            self._versions[-1] = version
            return
        self.pause(self._setting.update_s)
        self._has_weights_s = self.now_s
        self._changes.append(self._steps)
        self._versions.append(version)

    def wait(self, until_s: float) -> None:
        """Wait until a moment if no response is running."""
        if not self.running and self.now_s < until_s:
            self._idle_s += until_s - self.now_s
            self.now_s = until_s

    def idle_s(self, end_s: float) -> float:
        """Return the seconds spent without a response, between calls or receiving weights, up to the end of the run."""
        return self._idle_s - min(self._setting.update_s, max(0.0, self._has_weights_s - end_s))

    def next_end_s(self) -> float:
        """Return the end of the call in which the next response ends, if no other event comes first."""
        return self._course(self._calls_to_next_end())[0]

    def advance(self, until_s: float) -> Iterator[Response]:
        """Work until a moment, finish the call in progress, and yield the responses that complete."""
        setting = self._setting
        while self.running and self.now_s < until_s:
            step_s = self._step_s(self._steps, self.running[0][0], len(self.running), self._begun_sum)
            call_s = setting.call_s + setting.steps_per_call * step_s
            calls = min(self._calls_to_next_end(), max(1, math.ceil((until_s - self.now_s) / call_s - 1e-9)))
            self.now_s, self._steps, num_ended = self._course(calls)
            self._idle_s += calls * setting.call_s
            ended = self.running[:num_ended]
            del self.running[:num_ended]
            self._begun_sum -= sum(begin for _, begin, _ in ended)
            for end, begin, number in ended:
                yield number, self._spans(begin, end)
            if not ended and self.now_s >= until_s - 1e-9 * call_s:
                return
        self.wait(until_s)

    def _calls_to_next_end(self) -> int:
        return -(-(self.running[0][0] - self._steps) // self._setting.steps_per_call)

    def _course(self, calls: int) -> tuple[float, int, int]:
        """Return the moment, the step and the number of ended responses after some calls; the last may end early."""
        setting, running = self._setting, self.running
        now_s, steps = self.now_s + calls * setting.call_s, self._steps
        begun_sum, num_ended = self._begun_sum, 0
        last = min(steps + calls * setting.steps_per_call, running[-1][0])
        while steps < last:
            end = min(running[num_ended][0], last)
            now_s += (end - steps) * self._step_s(steps, end, len(running) - num_ended, begun_sum)
            steps = end
            while num_ended < len(running) and running[num_ended][0] == steps:
                begun_sum -= running[num_ended][1]
                num_ended += 1
        return now_s, steps, num_ended

    def _step_s(self, steps: int, end: int, count: int, begun_sum: int) -> float:
        """Return the mean seconds of a step of `count` responses until step `end`: that of their tokens halfway."""
        made = count * (steps + end) / 2 - begun_sum
        return self._setting.step_s(count, count * self._setting.prompt_tokens + made)

    def _spans(self, begin: int, end: int) -> Spans:
        """Return the tokens of the response that began at step `begin` and ended at step `end` of the last call."""
        first = bisect_right(self._changes, begin) - 1
        marks = pairwise([begin, *self._changes[first + 1 :], end])
        return tuple(
            (version, end - start)
            for version, (start, end) in zip(self._versions[first:], marks, strict=True)
            if end > start
        )


class _Simulation:
    """Engines, the queue of complete responses, and the trainer."""

    def __init__(self, setting: Setting) -> None:
        by_token = setting.bound == "token"
        self._setting, self._lengths = setting, _lengths(setting)
        self.engines = [_Engine(setting) for _ in range(setting.num_engines)]
        self._submitted = 0
        # Responses that end up in the same batch: those of a prompt, or under `response` those of a whole batch.
        self._group_size = setting.samples_per_prompt if by_token else setting.batch_size
        self._groups: defaultdict[int, list[Spans]] = defaultdict(list)
        self._complete: list[
            int
        ] = []  # groups: those that ended first come first, under `response` the oldest
        self._num_ready = 0
        self._training: list[Spans] = []
        self._events: list[tuple[float, int, int]] = []  # (seconds, owner, stamp)
        self._arrivals = itertools.count()
        # By stamp: responses that arrive between two events of their engine.
        self._arriving: dict[int, Response] = {}
        self._stamps = [0] * setting.num_engines
        self._step_ages: list[Mapping[int, int]] = []
        self._train_busy_s = 0.0
        self._queue: list[tuple[float, int]] = [(0.0, 0)]
        self._step_ends: list[float] = []  # its length is the version of the policy

    def run(self) -> Outcome:
        self._fill(range(len(self.engines)), 0.0)
        now = 0.0
        while len(self._step_ends) < self._setting.num_steps:
            now, place, stamp = heapq.heappop(self._events)
            if place == TRAINER:
                self._end_step(now)
            elif place == ARRIVAL:
                self._arrive(self._arriving.pop(stamp), now)
                self._start_step(now)
            elif stamp == self._stamps[place]:
                places = [place]  # engines that get free at the same moment share what may be begun
                while self._events and self._events[0][0] == now:
                    _, place, stamp = heapq.heappop(self._events)
                    places += [place] if stamp == self._stamps[place] else []
                for place in places:
                    self._take_responses(self.engines[place], now)
                self._fill(places, now)
                self._start_step(now)
        for engine in self.engines:
            self._take_responses(engine, now)
        return Outcome(
            self._step_ages,
            self._setting.max_staleness,
            self._train_busy_s,
            sum(engine.idle_s(now) for engine in self.engines),
            self._queue,
            self._step_ends,
            len(self.engines),
        )

    def _take_responses(self, engine: _Engine, now: float) -> None:
        """Advance an engine to a moment; responses that complete later, in its last call, become events."""
        for response in engine.advance(now):
            if engine.now_s <= now:
                self._arrive(response, now)
            else:
                stamp = next(self._arrivals)
                self._arriving[stamp] = response
                heapq.heappush(self._events, (engine.now_s, ARRIVAL, stamp))

    def _arrive(self, response: Response, now: float) -> None:
        number, spans = response
        group = number // self._group_size
        self._groups[group].append(spans)
        if len(self._groups[group]) == self._group_size:
            place = (
                len(self._complete) if self._setting.bound == "token" else bisect_right(self._complete, group)
            )
            self._complete.insert(place, group)
        self._num_ready += 1
        self._queue.append((now, self._num_ready))

    def _fill(self, places: Iterable[int], now: float) -> None:
        """Begin responses on engines with free slots, the emptiest first, and schedule the engines' next events."""
        engines, places = self.engines, list(places)
        for place in places:
            engines[place].wait(now)
        free = [(len(engines[place].running), place) for place in places]
        heapq.heapify(free)
        begun = set[int]()
        while free and self._may_begin():
            count, place = heapq.heappop(free)
            if count >= self._setting.max_running:
                break
            if place not in begun:
                begun.add(place)
                engines[place].pause(self._setting.call_s)
            engines[place].begin(self._submitted, next(self._lengths))
            self._submitted += 1
            heapq.heappush(free, (count + 1, place))
        for place in places:
            self._stamps[place] += 1
            if engines[place].running:
                heapq.heappush(self._events, (engines[place].next_end_s(), place, self._stamps[place]))

    def _may_begin(self) -> bool:
        """Return True if the staleness bound allows another response, and the run may still need it."""
        setting, version = self._setting, len(self._step_ends)
        complete = version * setting.batch_size + len(self._training) + len(self._complete) * self._group_size
        if complete >= setting.num_steps * setting.batch_size:
            return False
        return self._submitted // setting.batch_size <= version + setting.max_staleness

    def _start_step(self, now: float) -> None:
        """Start training on the next batch if its responses are complete and the trainer is idle."""
        setting = self._setting
        num_groups = setting.batch_size // self._group_size
        groups = self._complete[:num_groups]
        if self._training or len(groups) < num_groups:
            return
        if setting.bound == "response" and groups != [len(self._step_ends)]:
            return
        del self._complete[:num_groups]
        self._training = [spans for group in groups for spans in self._groups.pop(group)]
        self._num_ready -= setting.batch_size
        self._queue.append((now, self._num_ready))
        tokens = sum(count for spans in self._training for _, count in spans)
        train_s = setting.train_token_s * (tokens + setting.batch_size * setting.prompt_tokens)
        self._train_busy_s += train_s
        heapq.heappush(self._events, (now + train_s, TRAINER, 0))

    def _end_step(self, now: float) -> None:
        """Count the tokens of the batch by staleness, and send new weights to the engines."""
        ages = Counter[int]()
        for spans in self._training:
            for version, count in spans:
                ages[len(self._step_ends) - version] += count
        self._step_ages.append(ages)
        self._training = []
        self._step_ends.append(now)
        if len(self._step_ends) == self._setting.num_steps:
            return
        for engine in self.engines:
            self._take_responses(engine, now)
            engine.wait(now)
            engine.take_weights(len(self._step_ends), now)
        self._fill(range(len(self.engines)), now)
        self._start_step(now)
