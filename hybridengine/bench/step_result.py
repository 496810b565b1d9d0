"""Figures of `hybridengine bench step`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridengine.bench.step_spec import OwnWay, StepSpec, TrlWay

CONTROLLER = "controller"
"""Part of this project's steps in which no rank was in a call."""


@dataclass(frozen=True)
class StepTime:
    """One step of one side."""

    seconds: float
    tokens: int
    """Prompt and response tokens, without padding."""
    phases: Mapping[str, float]
    """Seconds by phase; where ranks differ, of the slowest."""


@dataclass(frozen=True)
class Side:
    """The counted steps of one side, in order, and the way that they were done."""

    way: OwnWay | TrlWay
    trials: Sequence[tuple[OwnWay | TrlWay, float]]
    """Ways that were tried, and the seconds of the fastest trial step of each; none where the way was given."""
    steps: Sequence[StepTime]

    @property
    def step_s(self) -> float:
        return statistics.median(step.seconds for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(step.tokens / step.seconds for step in self.steps)

    @property
    def phases_s(self) -> dict[str, float]:
        """Medians, the longest first."""
        names = dict.fromkeys(name for step in self.steps for name in step.phases)
        medians = {
            name: statistics.median(step.phases.get(name, 0.0) for step in self.steps) for name in names
        }
        return dict(sorted(medians.items(), key=lambda item: -item[1]))

    def as_dict(self) -> dict[str, Any]:
        """For programs. Units: seconds."""
        return {
            "way": self.way.as_dict(),
            "trials": [{**way.as_dict(), "step_s": seconds} for way, seconds in self.trials],
            "step_s": self.step_s,
            "samples_step_s": [step.seconds for step in self.steps],
            "samples_tokens": [step.tokens for step in self.steps],
        }


@dataclass(frozen=True)
class StepResult:
    """Both sides; TRL's is None where it was left out."""

    own: Side
    trl: Side | None

    @property
    def ratio(self) -> float | None:
        """Tokens per second over TRL's, medians."""
        return self.own.tokens_per_s / self.trl.tokens_per_s if self.trl else None

    @property
    def controller_share(self) -> float:
        """Share of a step in which no rank was in a call, median."""
        return statistics.median(step.phases[CONTROLLER] / step.seconds for step in self.own.steps)

    def as_dict(self, spec: StepSpec, model: str, machine: Mapping[str, Any]) -> dict[str, Any]:
        """Figures for programs. Units: seconds (medians, and all samples), tokens."""
        return {
            "model": model,
            "prompts": spec.num_prompts,
            "samples_per_prompt": spec.samples_per_prompt,
            "response_tokens": spec.response_tokens,
            "dtype": spec.dtype,
            "repetitions": spec.repetitions,
            "tokens_per_step": self.own.steps[0].tokens,
            "tokens_per_s": self.own.tokens_per_s,
            "trl_tokens_per_s": self.trl.tokens_per_s if self.trl else None,
            "ratio": self.ratio,
            "phases_s": self.own.phases_s,
            "trl_phases_s": self.trl.phases_s if self.trl else None,
            "controller_overhead_share": self.controller_share,
            "hybridengine": self.own.as_dict(),
            "trl": self.trl.as_dict() if self.trl else None,
            "machine": dict(machine),
        }
