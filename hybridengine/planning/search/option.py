"""One way for a model to have its ranks: sizes, seconds and memory.

What a switch costs comes from its plan, which takes long to make. Until an option is about to be chosen, the least that
its switch can cost stands for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hybridengine.planning.costs.dataflows import Work
from hybridengine.planning.costs.memory import StateBytes
from hybridengine.topology.sizes import GenSizes, TrainSizes


@dataclass(frozen=True)
class SwitchFigures:
    """Cost of switching the actor's weights."""

    there_s: float
    back_s: float
    peak_bytes: int
    """Weights on the rank with the most."""
    received_bytes: int = 0
    """Received on the way there by the rank with the most; 0 in bounds."""


@dataclass(frozen=True)
class EngineOption:
    """The actor's engine."""

    sizes: GenSizes
    gen_bytes: int
    """Weights of the engine."""
    kv_bytes: int
    """KV cache of a rank that generation can use; more would stay empty."""
    least_kv_bytes: int
    """KV cache that holds one response of the greatest length."""
    switch: SwitchFigures
    is_planned: bool = False
    """True if the switch's figures come from its plan; else they are lower bounds."""


@dataclass(frozen=True)
class Option:
    """Sizes of a model and what follows from them."""

    model: str
    sizes: TrainSizes
    works: tuple[Work, ...]
    """Kinds of its calls."""
    seconds: tuple[float, ...]
    """Seconds of its calls, without what a switch's plan says."""
    memory: StateBytes
    engine: EngineOption | None = None
    """The engine of the actor."""

    @cached_property
    def least_seconds(self) -> tuple[float, ...]:
        """Seconds of its calls: of a switch that has not been planned, the least."""
        if self.engine is None:
            return self.seconds
        switches = iter((self.engine.switch.there_s, self.engine.switch.back_s))
        return tuple(
            own + next(switches) if work is Work.SWITCH else own
            for own, work in zip(self.seconds, self.works, strict=True)
        )

    @cached_property
    def extra_bytes(self) -> int:
        """Most bytes that it needs beyond those that it always holds."""
        peak = max(self.memory.infer, self.memory.update)
        if (engine := self.engine) is not None:
            generating = engine.gen_bytes + engine.least_kv_bytes
            peak = max(peak, self.memory.generating + max(generating, engine.switch.peak_bytes))
        return max(0, peak - self.memory.idle)
