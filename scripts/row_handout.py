"""Seconds of generation if waiting rows stay with their engine, are levelled between engines, or come from one queue.

    python scripts/row_handout.py                               64 slots, 16 engines; a minute
    python scripts/row_handout.py --slots 256 --kv-gib 30       a KV cache that is full before the slots are
    python scripts/row_handout.py --engines 64

A model of engines with slots and a KV cache, independent of the planner's simulation but for the time of a step (an 8B
model on an H100) and the rule for moves. Lengths are lognormal; a part of the variance of their logarithm is shared by
the responses to a prompt. Seconds are relative to those of engines that draw the rows that they are given.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hybridengine.backends.levelling import STEPS, Queue, moves
from hybridengine.formatting import aligned
from hybridengine.models.presets import resolve_model
from hybridengine.planning.costs.clusters import load_planned_cluster
from hybridengine.planning.costs.decoding import PREFILL_TOKENS, Engine
from hybridengine.topology.sizes import GenSizes

SAMPLES, PROMPT_TOKENS, LONGEST = 8, 512, 8192
TICK = 8
"""Steps between two looks at free slots; engines look after every step."""


@dataclass(frozen=True)
class Row:
    """A response to a prompt, with the tokens that it had when it was preempted."""

    prompt: int
    length: int
    drawn: int = 0


class Slots:
    """An engine with a clock of its own."""

    def __init__(self, model: Engine, num_slots: int, kv_tokens: float) -> None:
        self.waiting, self.running = deque[Row](), list[Row]()
        self.seconds = self.slot_seconds = self.prefilled = 0.0
        self.num_ended = 0
        self.num_slots = num_slots
        self._model, self._kv_tokens = model, kv_tokens
        self._prefill_s = model.prefill_s(PREFILL_TOKENS) / PREFILL_TOKENS
        self._drawn, self._known = np.zeros(0), set[int]()

    @property
    def is_done(self) -> bool:
        return not self.running and not self.waiting

    @property
    def _context(self) -> float:
        return float(self._drawn.sum()) + PROMPT_TOKENS * len(self.running)

    def tick(self) -> None:
        """Take TICK steps: preempt what does not fit, admit what does, draw, and drop what has ended."""
        while len(self.running) > 1 and self._context + TICK * len(self.running) > self._kv_tokens:
            last = self.running.pop()
            self.waiting.appendleft(Row(last.prompt, last.length, int(self._drawn[-1])))
            self._drawn = self._drawn[:-1]
        tokens = self._admit()
        if not self.running:
            return
        seconds = TICK * self._model.step_s(len(self.running), self._context) + tokens * self._prefill_s
        self.seconds += seconds
        self.slot_seconds += seconds * len(self.running)
        self.prefilled += tokens
        self._drawn += TICK
        stays = np.array([row.length for row in self.running]) > self._drawn
        self.num_ended += int((~stays).sum())
        self.running = [row for row, stay in zip(self.running, stays, strict=True) if stay]
        self._drawn = self._drawn[stays]

    def _admit(self) -> int:
        """Admit waiting rows; return the tokens to prefill, without prompts that are cached."""
        tokens = 0
        while self.waiting and len(self.running) < self.num_slots:
            row = self.waiting[0]
            needed = PROMPT_TOKENS + row.drawn + TICK * (len(self.running) + 1)
            if self.running and self._context + needed > self._kv_tokens:
                break
            self.running.append(self.waiting.popleft())
            self._drawn = np.append(self._drawn, row.drawn)
            tokens += row.drawn + (0 if row.prompt in self._known else PROMPT_TOKENS)
            self._known.add(row.prompt)
        return tokens


def drawn_rows(
    generator: np.random.Generator, count: int, mean: float, variation: float, shared: float
) -> list[Row]:
    """Return rows, the samples of a prompt in succession."""
    sigma = np.sqrt(np.log1p(variation**2))
    of_prompt = np.repeat(generator.normal(size=-(-count // SAMPLES)), SAMPLES)[:count]
    normal = np.sqrt(shared) * of_prompt + np.sqrt(1 - shared) * generator.normal(size=count)
    lengths = np.clip(np.exp(np.log(mean) - sigma**2 / 2 + sigma * normal), 1, LONGEST).astype(int)
    return [Row(number // SAMPLES, int(length)) for number, length in enumerate(lengths)]


def alone(engines: Sequence[Slots]) -> float:
    """Let every engine draw its own rows."""
    for engine in engines:
        while not engine.is_done:
            engine.tick()
    return max(engine.seconds for engine in engines)


def levelled(engines: Sequence[Slots]) -> tuple[float, int]:
    """Compare the queues every STEPS steps, with a barrier, and level them; return rows moved as well."""
    num_moved = 0
    while True:
        for engine in engines:
            engine.num_ended = 0
            for _ in range(STEPS // TICK):
                engine.tick()
        now = max(engine.seconds for engine in engines)
        for engine in engines:
            engine.seconds = now
        if not any(engine.waiting for engine in engines):
            return alone(engines), num_moved
        queues = [Queue(len(one.waiting), len(one.running), one.num_ended) for one in engines]
        for giver, taker, count in moves(queues):
            engines[taker].waiting.extend(reversed([engines[giver].waiting.pop() for _ in range(count)]))
            num_moved += count


def queued(engines: Sequence[Slots], rows: Sequence[Row]) -> float:
    """Hand out rows from one queue as slots become free, without any wait."""
    queue, clocks = deque(rows), [(0.0, place) for place in range(len(engines))]
    for engine in list(engines) * engines[0].num_slots:
        if queue:
            engine.waiting.append(queue.popleft())
    while clocks:
        _, place = heapq.heappop(clocks)
        engine = engines[place]
        if not engine.waiting:
            free = min(len(queue), engine.num_slots - len(engine.running))
            engine.waiting.extend(queue.popleft() for _ in range(free))
        engine.tick()
        if queue or not engine.is_done:
            heapq.heappush(clocks, (engine.seconds, place))
    return max(engine.seconds for engine in engines)


def figures(rows: Sequence[Row], make: Callable[[], Slots], num_engines: int) -> list[float]:
    """Return the figures of a line of the table."""
    size = len(rows) // num_engines

    def engines() -> list[Slots]:
        made = [make() for _ in range(num_engines)]
        for place, engine in enumerate(made):
            engine.waiting.extend(rows[place * size : (place + 1) * size])
        return made

    def idle(made: Sequence[Slots], seconds: float) -> float:
        return 1 - sum(one.slot_seconds for one in made) / (seconds * sum(one.num_slots for one in made))

    own, shared = engines(), engines()
    own_s = alone(own)
    levelled_s, num_moved = levelled(shared)
    prefilled = sum(one.prefilled for one in shared) / sum(one.prefilled for one in own)
    queue_s = queued([make() for _ in range(num_engines)], rows)
    longest_first_s = queued([make() for _ in range(num_engines)], sorted(rows, key=lambda row: -row.length))
    return [
        own_s,
        idle(own, own_s),
        levelled_s / own_s,
        idle(shared, levelled_s),
        num_moved / len(rows),
        prefilled,
        queue_s / own_s,
        longest_first_s / own_s,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--slots", type=int, default=64, help="slots of an engine")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8], help="rows per slot")
    parser.add_argument("--kv-gib", type=float, default=1e6, help="KV cache of an engine")
    parser.add_argument("--mean", type=float, default=1500.0)
    parser.add_argument("--variation", type=float, default=1.0, help="standard deviation over mean")
    parser.add_argument("--shared", type=float, default=0.5, help="share of the variance between prompts")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    cluster = load_planned_cluster("configs/clusters/h100-80gb.yaml", "bfloat16")
    model = Engine(resolve_model("llama3-8b"), GenSizes(1, 1), 1, "bfloat16", cluster, given.engines)
    kv_tokens = given.kv_gib * 2**30 / model.kv_token_bytes
    names = "rows/slot own_s idle levelled idle moved prefilled queue longest-first"
    table = [[*map(str, names.split())]]
    for per_slot in given.rows:
        lines = []
        for seed in range(given.seeds):
            count = per_slot * given.slots * given.engines
            rows = drawn_rows(np.random.default_rng(seed), count, given.mean, given.variation, given.shared)
            lines.append(figures(rows, lambda: Slots(model, given.slots, kv_tokens), given.engines))
        table.append([str(per_slot), *(f"{value:.3f}" for value in np.mean(lines, axis=0))])
    print(*aligned(table), sep="\n")


if __name__ == "__main__":
    main()
