"""Deterministic discrete-event simulation of training runs: engines, a queue of responses, a trainer, weight updates.

    synchronous    all devices generate a batch, then all train on it
    asynchronous   some devices generate all the time, the others train; after each optimizer step the engines receive
                   new weights, between two tokens

An event is the end of a response or of an optimizer step; simulated_engine.py describes the work of an engine between two
events.

A response is begun only while floor((N_r - 1) / B) <= i + eta, so that the responses begun, N_r, are at most eta batches
ahead of the trainer's step i (AReaL, arXiv 2505.24298, section 5.1). None is begun once all responses that the run trains
on are complete: engines that are far ahead then wait, and the cost of a simulation does not grow with their number.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hybridengine.planning.costs.lengths import Lengths
from hybridengine.planning.simulation.simulated_engine import Response, SimulatedEngine, StepSeconds

TRAINER, ARRIVAL = -1, -2
"""Owners of events that do not belong to an engine."""


@dataclass(frozen=True)
class Setting:
    """Settings of a simulated run."""

    num_steps: int
    """Number of optimizer steps, one per batch."""
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
    """Number of batches that may be begun ahead of the trainer; infinite for no bound."""
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """Figures of a simulated run."""

    staleness_counts: Mapping[int, int]
    """Number of response tokens by staleness: optimizer steps from the policy of a token to the one trained on it."""
    train_busy_s: float
    generate_idle_s: float
    """Total seconds of all engines without a response or receiving weights."""
    queue: list[tuple[float, int]]
    """(seconds, complete responses that wait for the trainer) at every change."""
    step_ends: list[float]
    num_engines: int

    @property
    def seconds(self) -> float:
        return self.step_ends[-1]

    @property
    def tokens(self) -> int:
        """Number of response tokens that were trained on."""
        return sum(self.staleness_counts.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

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


def _engines(setting: Setting) -> list[SimulatedEngine]:
    return [
        SimulatedEngine(setting.step_s, setting.prompt_tokens, setting.prefill_s, setting.update_s)
        for _ in range(setting.num_engines)
    ]


def _train_s(setting: Setting, tokens: int) -> float:
    """Return the seconds of an optimizer step on a batch with `tokens` response tokens."""
    return setting.train_token_s * (tokens + setting.batch_size * setting.prompt_tokens)


def simulate_asynchronous(setting: Setting) -> Outcome:
    """Simulate engines and a trainer that work at the same time, deterministically."""
    return _Asynchronous(setting).run()


def simulate_synchronous(setting: Setting) -> Outcome:
    """Simulate engines that divide each batch, and training that begins when the last response is complete."""
    lengths, now, tokens, idle, train_busy = _lengths(setting), 0.0, 0, 0.0, 0.0
    step_ends: list[float] = []
    queue: list[tuple[float, int]] = [(0.0, 0)]
    for _ in range(setting.num_steps):
        engines, begin = _engines(setting), now + setting.update_s / 2
        batch = list(itertools.islice(lengths, setting.batch_size))
        finished: list[float] = []
        for place, engine in enumerate(engines):
            waiting = deque(batch[place :: setting.num_engines])
            while waiting or engine.running:
                while waiting and len(engine.running) < setting.max_running:
                    engine.begin(waiting.popleft())
                finished += [begin + engine.now_s for _ in engine.advance(engine.next_end_s())]
        queue += [(moment, count) for count, moment in enumerate(sorted(finished), start=1)]
        generated, train_s = max(engine.now_s for engine in engines), _train_s(setting, sum(batch))
        now += generated + setting.update_s
        queue.append((max(now, queue[-1][0]), 0))
        now += train_s
        idle += sum(generated - engine.now_s + setting.update_s + train_s for engine in engines)
        train_busy += train_s
        tokens += sum(batch)
        step_ends.append(now)
    return Outcome({0: tokens}, train_busy, idle, queue, step_ends, setting.num_engines)


class _Asynchronous:
    """Simulation of engines and a trainer that work at the same time."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._lengths = setting, _lengths(setting)
        self._engines = _engines(setting)
        self._submitted = 0
        self._ready: deque[Response] = deque()
        self._training: list[Response] = []
        self._events: list[tuple[float, int, int]] = []  # (seconds, owner, stamp)
        self._arrivals = itertools.count()
        self._arriving: dict[
            int, Response
        ] = {}  # by stamp: responses that end between two events of their engine
        self._stamps = [0] * setting.num_engines
        self._staleness = Counter[int]()
        self._train_busy_s = 0.0
        self._queue: list[tuple[float, int]] = [(0.0, 0)]
        self._step_ends: list[float] = []  # its length is the version of the policy

    def run(self) -> Outcome:
        """Simulate the run to the end of its last optimizer step."""
        self._fill(range(len(self._engines)), 0.0)
        now = 0.0
        while len(self._step_ends) < self._setting.num_steps:
            now, place, stamp = heapq.heappop(self._events)
            if place == TRAINER:
                self._end_step(now)
            elif place == ARRIVAL:
                self._arrive(self._arriving.pop(stamp), now)
                self._start_step(now)
            elif stamp == self._stamps[place]:
                self._take_responses(self._engines[place], now)
                self._fill([place], now)
                self._start_step(now)
        for engine in self._engines:
            self._take_responses(engine, now)
        return Outcome(
            dict(sorted(self._staleness.items())),
            self._train_busy_s,
            sum(engine.idle_s(now) for engine in self._engines),
            self._queue,
            self._step_ends,
            len(self._engines),
        )

    def _take_responses(self, engine: SimulatedEngine, now: float) -> None:
        """Advance an engine to a moment; responses that complete later, in its last step, become events."""
        for response in engine.advance(now):
            if engine.now_s <= now:
                self._arrive(response, now)
            else:
                stamp = next(self._arrivals)
                self._arriving[stamp] = response
                heapq.heappush(self._events, (engine.now_s, ARRIVAL, stamp))

    def _arrive(self, response: Response, now: float) -> None:
        self._ready.append(response)
        self._queue.append((now, len(self._ready)))

    def _fill(self, places: Iterable[int], now: float) -> None:
        """Begin responses on engines with free slots, the emptiest first, and schedule the engines' next events."""
        engines, places = self._engines, list(places)
        for place in places:
            engines[place].wait(now)
        free = [(len(engines[place].running), place) for place in places]
        heapq.heapify(free)
        while free and self._may_begin():
            count, place = heapq.heappop(free)
            if count >= self._setting.max_running:
                break
            engines[place].begin(next(self._lengths))
            self._submitted += 1
            heapq.heappush(free, (count + 1, place))
        for place in places:
            self._stamps[place] += 1
            if engines[place].running:
                heapq.heappush(self._events, (engines[place].next_end_s(), place, self._stamps[place]))

    def _may_begin(self) -> bool:
        """Return True if the staleness bound allows another response, and the run may still need it."""
        setting, version = self._setting, len(self._step_ends)
        complete = version * setting.batch_size + len(self._training) + len(self._ready) + len(self._arriving)
        if complete >= setting.num_steps * setting.batch_size:
            return False
        return self._submitted // setting.batch_size <= version + setting.max_staleness

    def _start_step(self, now: float) -> None:
        """Start training on the oldest complete responses if there are enough and the trainer is idle."""
        setting = self._setting
        if self._training or len(self._ready) < setting.batch_size:
            return
        self._training = [self._ready.popleft() for _ in range(setting.batch_size)]
        self._queue.append((now, len(self._ready)))
        train_s = _train_s(setting, sum(count for response in self._training for _, count in response))
        self._train_busy_s += train_s
        heapq.heappush(self._events, (now + train_s, TRAINER, 0))

    def _end_step(self, now: float) -> None:
        """Count the tokens of the batch by staleness, and send new weights to the engines."""
        for response in self._training:
            for version, count in response:
                self._staleness[len(self._step_ends) - version] += count
        self._training = []
        self._step_ends.append(now)
        if len(self._step_ends) == self._setting.num_steps:
            return
        for engine in self._engines:
            self._take_responses(engine, now)
            engine.wait(now)
            engine.take_weights(len(self._step_ends), now)
        self._fill(range(len(self._engines)), now)
        self._start_step(now)
