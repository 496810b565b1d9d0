"""A deterministic discrete-event simulation of training runs: engines, a queue of responses, a trainer, weight updates.

    synchronous    all devices generate a batch, then all train on it
    asynchronous   some devices generate all the time, the others train; after each optimizer step new weights go to the
                   engines, between two tokens of what they are generating (in flight), or once that is complete (drain)

An event is the end of a response or of an optimizer step; how an engine works between two of them is in
simulated_engine.py.

A response is begun only while floor((N_r - 1) / B) <= i + eta: what has been begun, N_r, is at most eta batches ahead of
the trainer's i (AReaL, arXiv 2505.24298, section 5.1). None is begun once everything is complete that the run trains on:
engines that are far ahead then wait, and a run costs the same however many they are.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from hybridengine.errors import ConfigError
from hybridengine.planning.lengths import Lengths
from hybridengine.planning.simulated_engine import Done, SimulatedEngine, StepSeconds

TRAINER, ARRIVAL = -1, -2
"""Whose an event is, where it is no engine's."""


@dataclass(frozen=True)
class Setting:
    """What is simulated."""

    num_steps: int
    """Optimizer steps (of an iteration's batch)."""
    batch_size: int
    """Responses of a step."""
    num_engines: int
    max_running: int
    """Responses that an engine advances at once."""
    prompt_tokens: float
    lengths: Lengths
    step_s: StepSeconds
    prefill_s: float
    """Of one prompt, which its engine spends before the response begins."""
    train_s: Callable[[float], float]
    """Seconds of a step on so many tokens, prompts included."""
    update_s: float
    """Seconds for which an engine stops to take new weights; of a synchronous run, of the switch there and back."""
    max_staleness: float = 1.0
    """Batches that may be begun ahead of the trainer; infinite for no bound."""
    drains: bool = False
    """Engines take new weights only when what they are generating is complete."""
    synchronous: bool = False
    seed: int = 0

    def check(self) -> None:
        """Check that the numbers make sense.

        Raises:
            ConfigError: one does not.
        """
        for name in ("num_steps", "batch_size", "num_engines", "max_running"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; raise it")
        for name in ("prefill_s", "update_s", "max_staleness"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more; raise it")


@dataclass(frozen=True)
class Outcome:
    """What a simulated run amounts to."""

    seconds: float
    tokens: int
    """Of the responses that were trained on."""
    staleness_counts: dict[int, int]
    """Optimizer steps between the policy of a token and the one that trained on it -> tokens."""
    train_busy_s: float
    generate_busy_s: float
    """Of all engines together."""
    generate_idle_s: float
    """Of all engines together: without a response, or with new weights on their way."""
    queue: list[tuple[float, int]]
    """(seconds, responses that are complete and wait for the trainer), whenever it changes."""
    step_ends: list[float]
    num_engines: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def train_idle_share(self) -> float:
        """Of the trainer's time, waiting for responses."""
        return 1.0 - self.train_busy_s / self.seconds

    @property
    def generate_idle_share(self) -> float:
        """Of the engines' time."""
        return self.generate_idle_s / (self.seconds * self.num_engines)

    @property
    def mean_staleness(self) -> float:
        """Of a token."""
        return sum(lag * count for lag, count in self.staleness_counts.items()) / max(1, self.tokens)

    def staleness_quantile(self, share: float) -> int:
        """Least number of steps that at least such a share of the tokens is not older than."""
        passed = 0
        for lag, count in sorted(self.staleness_counts.items()):
            passed += count
            if passed >= share * self.tokens:
                return lag
        return self.largest_staleness

    def queue_over_time(self, num_points: int) -> tuple[list[float], list[int]]:
        """Ends of as many equal parts of the run, and the most responses that waited in each."""
        moments, counts = np.array([moment for moment, _ in self.queue]), [count for _, count in self.queue]
        ends = np.linspace(0.0, self.seconds, num_points + 1)[1:]
        last = np.searchsorted(moments, ends, side="right")
        most, first = [], 0
        for end in last.tolist():
            # What waited when the part began still does until the first change.
            most.append(max(counts[max(0, first - 1) : end], default=0))
            first = end
        return ends.tolist(), most

    @property
    def largest_staleness(self) -> int:
        return max(self.staleness_counts, default=0)


def simulate(setting: Setting) -> Outcome:
    """Simulate a run; equal settings give equal outcomes.

    Raises:
        ConfigError: numbers that make no sense.
    """
    setting.check()
    return _synchronous(setting) if setting.synchronous else _Asynchronous(setting).run()


def _lengths(setting: Setting) -> Iterator[int]:
    generator = np.random.default_rng(setting.seed)
    while True:
        yield from setting.lengths.sample(generator, 4096).tolist()


def _engines(setting: Setting) -> list[SimulatedEngine]:
    return [
        SimulatedEngine(setting.step_s, setting.prompt_tokens, setting.prefill_s, setting.update_s)
        for _ in range(setting.num_engines)
    ]


def _synchronous(setting: Setting) -> Outcome:
    """Batches are shared out over the engines; training begins when the last response is complete."""
    lengths, now, tokens, busy, idle, train_busy = _lengths(setting), 0.0, 0, 0.0, 0.0, 0.0
    ends: list[float] = []
    queue: list[tuple[float, int]] = [(0.0, 0)]
    for _ in range(setting.num_steps):
        engines = _engines(setting)
        batch = list(itertools.islice(lengths, setting.batch_size))
        finished: list[float] = []
        for place, engine in enumerate(engines):
            waiting = deque(batch[place :: setting.num_engines])
            while waiting or engine.running:
                while waiting and len(engine.running) < setting.max_running:
                    engine.begin(len(waiting), waiting.popleft())
                for _ in engine.advance(engine.next_end_s()):
                    finished.append(now + setting.update_s / 2 + engine.now_s)
        generated = max(engine.now_s for engine in engines)
        busy += sum(engine.busy_s for engine in engines)
        idle += sum(generated - engine.busy_s for engine in engines)
        queue += [(moment, count) for count, moment in enumerate(sorted(finished), start=1)]
        train_s = setting.train_s(sum(batch) + setting.batch_size * setting.prompt_tokens)
        now += generated + setting.update_s
        queue.append((max(now, queue[-1][0]), 0))
        now += train_s
        idle += setting.num_engines * (setting.update_s + train_s)
        train_busy += train_s
        tokens += sum(batch)
        ends.append(now)
    return Outcome(now, tokens, {0: tokens}, train_busy, busy, idle, queue, ends, setting.num_engines)


class _Asynchronous:
    """Engines and a trainer at the same time."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._lengths = setting, _lengths(setting)
        self._engines = _engines(setting)
        self._submitted, self._version = 0, 0
        self._ready: deque[Done] = deque()
        self._events: list[tuple[float, int, int]] = []  # seconds; engine, or whose it is; stamp
        self._arrivals = itertools.count()
        self._arriving: dict[int, Done] = {}  # stamp -> a response that its engine ends between two events
        self._stamps = [0] * setting.num_engines
        self._training: list[Done] = []
        self._training_s = 0.0
        self._staleness: dict[int, int] = {}
        self._tokens, self._train_busy_s = 0, 0.0
        self._queue: list[tuple[float, int]] = [(0.0, 0)]
        self._step_ends: list[float] = []

    def run(self) -> Outcome:
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
                self._advance(place, now)
        engines = self._engines
        for engine in engines:
            for _ in engine.advance(now):
                pass
            engine.stop(now)
        return Outcome(
            now,
            self._tokens,
            dict(sorted(self._staleness.items())),
            self._train_busy_s,
            sum(engine.busy_s for engine in engines),
            sum(engine.idle_s for engine in engines),
            self._queue,
            self._step_ends,
            len(engines),
        )

    def _advance(self, place: int, now: float) -> None:
        """An engine comes to the end of a response."""
        engine = self._engines[place]
        self._take_done(engine, now)
        if engine.pending_version is not None and not engine.running:
            engine.take_weights(engine.pending_version, now)
        self._fill([place], now)
        self._start_step(now)

    def _take_done(self, engine: SimulatedEngine, now: float) -> None:
        """Let an engine work until a moment; what it completes in the step that goes beyond arrives later."""
        for done in engine.advance(now):
            if engine.now_s <= now:
                self._arrive(done, now)
            else:
                stamp = next(self._arrivals)
                self._arriving[stamp] = done
                heapq.heappush(self._events, (engine.now_s, ARRIVAL, stamp))

    def _arrive(self, done: Done, now: float) -> None:
        """A response is complete."""
        self._ready.append(done)
        self._queue.append((now, len(self._ready)))

    def _fill(self, places: Iterable[int], now: float) -> None:
        """Begin responses where there is room, those engines first that have the fewest; note when the next ones end."""
        setting, engines = self._setting, self._engines
        places = list(places)
        for place in places:
            engines[place].wait(now)
        free = [
            (len(engines[place].running), place) for place in places if engines[place].pending_version is None
        ]
        heapq.heapify(free)
        while free and self._begins():
            count, place = heapq.heappop(free)
            if count >= setting.max_running:
                break
            engines[place].begin(self._submitted, next(self._lengths))
            self._submitted += 1
            heapq.heappush(free, (count + 1, place))
        for place in places:
            self._stamps[place] += 1
            if engines[place].running:
                heapq.heappush(self._events, (engines[place].next_end_s(), place, self._stamps[place]))

    def _begins(self) -> bool:
        """Return True if the bound lets another response begin, and the run may still train on it."""
        setting = self._setting
        complete = self._version * setting.batch_size + len(self._training) + len(self._ready)
        complete += len(self._arriving)
        if complete >= setting.num_steps * setting.batch_size:
            return False
        return self._submitted // setting.batch_size <= self._version + setting.max_staleness

    def _start_step(self, now: float) -> None:
        """Train on the oldest complete responses, where there are enough and nothing is trained on."""
        setting = self._setting
        if self._training or len(self._ready) < setting.batch_size:
            return
        self._training = [self._ready.popleft() for _ in range(setting.batch_size)]
        self._queue.append((now, len(self._ready)))
        tokens = sum(done.length for done in self._training)
        train_s = setting.train_s(tokens + setting.batch_size * setting.prompt_tokens)
        self._training_s = train_s
        heapq.heappush(self._events, (now + train_s, TRAINER, 0))

    def _end_step(self, now: float) -> None:
        """New weights: engines take them between two tokens, or when they are done with what they have."""
        self._train_busy_s += self._training_s
        for done in self._training:
            self._tokens += done.length
            for version, count in done.versions:
                lag = self._version - version
                self._staleness[lag] = self._staleness.get(lag, 0) + count
        self._training = []
        self._version += 1
        self._step_ends.append(now)
        if len(self._step_ends) == self._setting.num_steps:
            return
        for engine in self._engines:
            self._take_done(engine, now)
            if self._setting.drains and engine.running:
                engine.pending_version = self._version
            else:
                engine.wait(now)
                engine.take_weights(self._version, now)
        self._fill(range(len(self._engines)), now)
        self._start_step(now)
