"""How far a run is, how fast, and how long it will still take."""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from hybridengine.metrics import keys
from hybridengine.metrics.held_out import HeldOutResult
from hybridengine.metrics.rows import Row


class Stage(Enum):
    """What a run is in."""

    BETWEEN = "between"
    STEP = "step"
    EVALUATION = "evaluation"


@dataclass(frozen=True)
class StepReading:
    """A run at a moment. None where there is nothing to say yet; NaN where a value was not finite."""

    step: int = 0
    """The last one that was begun."""
    num_done: int = 0
    """Steps whose row has been written."""
    stage: Stage = Stage.BETWEEN
    passed_s: float = 0.0
    """Since the first row's work began."""
    left_s: float | None = None
    """Until the last row, evaluations included."""
    tokens_per_s: float | None = None
    """Of the last step."""
    mean_tokens_per_s: float | None = None
    """All tokens over the seconds of all steps."""
    reward: float | None = None
    """Of the last step."""
    first_reward: float | None = None
    best_reward: float | None = None
    held_out: HeldOutResult | None = None
    """Of the last evaluation."""
    first_held_out: HeldOutResult | None = None


class StepProgress:
    """Steps and evaluations as they begin and end; read from any thread.

    Args:
        eval_every: as the configuration has it; 0 evaluates after the last step only.
        evaluates: whether there is anything to evaluate on.
        clock: seconds.
    """

    def __init__(
        self, num_steps: int, eval_every: int, evaluates: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_steps = num_steps
        self._eval_every, self._evaluates = eval_every, evaluates
        self._clock, self._lock = clock, threading.Lock()
        self._began_s, self._stage_began_s = clock(), clock()
        self._step_times, self._eval_times = _Times(), _Times()
        self._tokens, self._seconds = 0.0, 0.0
        self._now = StepReading()

    def begin_step(self, step: int) -> None:
        """A step begins."""
        with self._lock:
            self._enter(Stage.STEP, step)

    def begin_evaluation(self, step: int) -> None:
        """The step's own work is done, and its evaluation begins; step 0 is the state before training."""
        with self._lock:
            self._enter(Stage.EVALUATION, step)

    def end(self, row: Row) -> None:
        """The step's row has been written."""
        with self._lock:
            step = row[keys.STEP] or 0
            self._enter(Stage.BETWEEN, int(step))
            now = replace(self._now, num_done=max(self._now.num_done, int(step)))
            if keys.REWARD_MEAN in row:
                reward = _number(row[keys.REWARD_MEAN])
                first = reward if now.first_reward is None else now.first_reward
                now = replace(
                    now, reward=reward, first_reward=first, best_reward=_best(now.best_reward, reward)
                )
            if held_out := HeldOutResult.of(row):
                now = replace(now, held_out=held_out, first_held_out=now.first_held_out or held_out)
            rate, seconds = row.get(keys.TOKENS_PER_S), row.get(keys.STEP_S)
            if rate is not None and seconds is not None:
                self._tokens += rate * seconds
                self._seconds += seconds
                mean = self._tokens / self._seconds if self._seconds else None
                now = replace(now, tokens_per_s=rate, mean_tokens_per_s=mean)
            self._now = now

    def read(self) -> StepReading:
        """How it stands."""
        with self._lock:
            now = self._clock()
            return replace(self._now, passed_s=now - self._began_s, left_s=self._left_s(now))

    def _enter(self, stage: Stage, step: int) -> None:
        now = self._clock()
        seconds = now - self._stage_began_s
        if self._now.stage is Stage.STEP:
            self._step_times.add(seconds)
        elif self._now.stage is Stage.EVALUATION:
            self._eval_times.add(seconds)
        self._stage_began_s = now
        self._now = replace(self._now, stage=stage, step=step)

    def _left_s(self, now: float) -> float | None:
        """What has not begun at the median's pace, and the rest of what has, which is at least nothing."""
        step_s, eval_s = self._step_times.median, self._eval_times.median
        step, stage = self._now.step, self._now.stage
        evaluations = num_evaluations(
            step if stage is Stage.STEP else step + 1, self.num_steps, self._eval_every
        )
        if step >= self.num_steps and stage is not Stage.STEP:
            step_s = step_s or 0.0
        if not self._evaluates:
            evaluations, eval_s = 0, 0.0
        if step_s is None or (eval_s is None and (evaluations or stage is Stage.EVALUATION)):
            return None
        eval_s = eval_s or 0.0
        left = (self.num_steps - step) * step_s + evaluations * eval_s
        under_way = {Stage.STEP: step_s, Stage.EVALUATION: eval_s, Stage.BETWEEN: 0.0}[stage]
        return left + max(0.0, under_way - (now - self._stage_began_s))


class _Times:
    """Durations in order of length, and their median."""

    def __init__(self) -> None:
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        bisect.insort(self._sorted, seconds)

    @property
    def median(self) -> float | None:
        """None of nothing."""
        middle = len(self._sorted) // 2
        if not self._sorted:
            return None
        return (self._sorted[middle] + self._sorted[~middle]) / 2


def num_evaluations(first: int, num_steps: int, every: int) -> int:
    """Evaluations after the steps from `first` to the last: after every `every`-th, and after the last one."""
    if first > num_steps:
        return 0
    regular = num_steps // every - (first - 1) // every if every else 0
    return regular + (0 if every and num_steps % every == 0 else 1)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _best(best: float | None, value: float) -> float:
    if best is None or math.isnan(best):
        return value
    return best if math.isnan(value) else max(best, value)
