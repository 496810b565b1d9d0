"""Option for a model: parallel sizes, with their seconds and memory.

The cost of a switch follows from its plan, which is expensive to compute. Until an option is about to be chosen, a lower
bound is used instead.
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
    """Peak bytes of weights on any rank."""
    received_bytes: int = 0
    """Largest bytes received by a rank in the switch to generation; 0 in lower bounds."""


@dataclass(frozen=True)
class EngineOption:
    """Option for the actor's engine."""

    sizes: GenSizes
    gen_bytes: int
    """Bytes of the engine's weights on a rank."""
    kv_bytes: int
    """Bytes of KV cache on a rank; at most those that generation can use."""
    least_kv_bytes: int
    """Bytes of KV cache that hold one response of the greatest length."""
    switch: SwitchFigures
    is_planned: bool = False
    """True if the switch's figures come from its plan; otherwise they are lower bounds."""


@dataclass(frozen=True)
class Option:
    """Sizes of a model, with the resulting seconds and memory."""

    model: str
    sizes: TrainSizes
    works: tuple[Work, ...]
    """Kind of each of the model's calls."""
    seconds: tuple[float, ...]
    """Seconds of each call, without the transfers of a switch."""
    memory: StateBytes
    engine: EngineOption | None = None
    """Engine of the actor; None for other models."""

    @cached_property
    def least_seconds(self) -> tuple[float, ...]:
        """Seconds of each call, with a lower bound for switches that are not planned."""
        if self.engine is None:
            return self.seconds
        switches = iter((self.engine.switch.there_s, self.engine.switch.back_s))
        return tuple(
            own + next(switches) if work is Work.SWITCH else own
            for own, work in zip(self.seconds, self.works, strict=True)
        )

    @cached_property
    def extra_bytes(self) -> int:
        """Peak bytes that the model needs in addition to those that it always holds."""
        peak = max(self.memory.infer, self.memory.update)
        if (engine := self.engine) is not None:
            generating = engine.gen_bytes + engine.least_kv_bytes
            peak = max(peak, self.memory.generating + max(generating, engine.switch.peak_bytes))
        return max(0, peak - self.memory.idle)
