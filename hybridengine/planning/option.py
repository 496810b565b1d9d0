"""One way for a model to have its ranks: sizes, seconds and memory, and when another way is at least as good.

An option is dominated by another one that is no slower in any call and needs no more memory in any state: only options
that nothing dominates are kept, which loses no best plan, since an iteration never gets shorter when one of its calls
gets longer.

What a switch costs comes from its plan, which takes long to make. Until an option is about to be chosen, bounds stand for
it: an option dominates another one only if it does so with the most that its switch can cost against the least of the
other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybridengine.planning.dataflows import Work
from hybridengine.topology.sizes import GenSizes, TrainSizes


@dataclass(frozen=True)
class StateBytes:
    """Memory of a model on the rank with the most, by what it is doing."""

    idle: int
    """While others work. The actor is in training mode then."""
    infer: int
    update: int


@dataclass(frozen=True)
class SwitchFigures:
    """What switching the actor's weights costs."""

    there_s: float
    back_s: float
    peak_bytes: int
    """Of the weights, on the rank with the most."""
    received_bytes: int = 0
    """That the rank with the most receives on the way there; 0 in bounds."""


@dataclass(frozen=True)
class EngineOption:
    """How the actor generates."""

    sizes: GenSizes
    gen_bytes: int
    """Weights of the engine."""
    state_bytes: int
    """Optimizer state that stays while generating."""
    state_s: float
    """Of moving optimizer state to host memory, and of moving it back."""
    kv_bytes: int
    """KV cache of a rank that generation can use: more would stay empty."""
    least_kv_bytes: int
    """That holds one response of the greatest length."""
    least: SwitchFigures
    most: SwitchFigures
    """Bounds of the switch; equal once it has been planned."""

    @property
    def is_planned(self) -> bool:
        """Whether the switch's figures come from its plan."""
        return self.least == self.most


@dataclass(frozen=True)
class Option:
    """Sizes of a model and what follows from them."""

    model: str
    sizes: TrainSizes
    works: tuple[Work, ...]
    """Of its calls."""
    seconds: tuple[float, ...]
    """Of its calls, without what a switch's plan says."""
    memory: StateBytes
    engine: EngineOption | None = None
    """Of the actor."""

    @cached_property
    def least_seconds(self) -> tuple[float, ...]:
        """Seconds of its calls: of a switch that has not been planned, the least."""
        return self.seconds if self.engine is None else self._with_switches(self.engine.least)

    @cached_property
    def most_seconds(self) -> tuple[float, ...]:
        """The same with the most that a switch can take."""
        return self.seconds if self.engine is None else self._with_switches(self.engine.most)

    def _with_switches(self, figures: SwitchFigures) -> tuple[float, ...]:
        switches = iter((figures.there_s, figures.back_s))
        return tuple(
            own + next(switches) if work is Work.SWITCH else own
            for own, work in zip(self.seconds, self.works, strict=True)
        )

    def extra_bytes(self, *, most: bool = False) -> int:
        """What it needs at most beyond what it always holds."""
        peak = max(self.memory.infer, self.memory.update)
        if (engine := self.engine) is not None:
            bound = engine.most if most else engine.least
            generating = engine.gen_bytes + engine.least_kv_bytes
            peak = max(peak, engine.state_bytes + max(generating, bound.peak_bytes))
        return max(0, peak - self.memory.idle)

    def figures(self, *, most: bool = False) -> list[float]:
        """What another option must not be better in: times, then bytes.

        Of a switch that has not been planned, the least or the most.

        Switches and what lies between them follow one another on the same ranks: when they end counts, not each.
        """
        found, passed = [], 0.0
        seconds = self.most_seconds if most else self.least_seconds
        for work, own in zip(self.works, seconds, strict=True):
            passed = passed + own if work in (Work.SWITCH, Work.GENERATE) else 0.0
            found.append(passed or own)
        if self.engine is not None:
            found.pop(0)  # of the first switch: generation follows at once
        found += [self.memory.idle, self.extra_bytes(most=most)]
        if (engine := self.engine) is not None:
            found += [
                engine.state_bytes + engine.gen_bytes - self.memory.idle,
                engine.kv_bytes,
                engine.least_kv_bytes,
            ]
        return found


def undominated(options: Sequence[Option]) -> list[Option]:
    """Those that no other one is surely at least as good as in every figure."""
    least, most = ([option.figures(most=most) for option in options] for most in (False, True))
    return [options[place] for place in undominated_rows(least, most)]


def undominated_rows(least: Sequence[Sequence[float]], most: Sequence[Sequence[float]]) -> list[int]:
    """Rows whose least figures no other row's most figures are below or equal to; of equal rows, the first."""
    if not least:
        return []
    low, high = np.array(least, dtype=np.float64), np.array(most, dtype=np.float64)
    scale = np.maximum(high.max(axis=0), 1e-30)
    kept: list[int] = []
    # What beats a row comes before it in this order, and what beats that beats the row as well.
    for place in np.lexsort(((low / scale).sum(axis=1), (high / scale).sum(axis=1))):
        if not (high[kept] <= low[place]).all(axis=1).any():
            kept.append(int(place))
    return sorted(kept)
