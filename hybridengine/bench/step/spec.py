"""Work of `hybridengine bench step`, the ways that each side may choose from, and the figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridengine.machine import machine_figures
from hybridengine.topology.sizes import GenSizes, TrainSizes

TRIAL_STEPS = 3
"""Number of steps to try each way, of which the first is not counted."""
WARM_UP_STEPS = 2
"""Number of uncounted steps of each side before the counted ones."""
CONTROLLER = "controller"
"""Name of the phase of this project's steps in which no rank is in a call."""


@dataclass(frozen=True)
class StepSpec:
    """Work of a step, the same for both sides."""

    num_prompts: int
    samples_per_prompt: int
    response_tokens: int
    """Tokens of every response; none ends earlier."""
    dtype: str
    """float32, or bfloat16 with float32 master weights and optimizer state; TRL then uses autocast if that is faster."""
    repetitions: int
    """Number of counted steps of each side."""
    timeout_s: float
    """Time limit for a step, and for the start of a side."""
    lr: float = 1e-6
    kl_coef: float = 0.02
    """Weight of the KL loss against the reference (k3 estimator)."""

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.samples_per_prompt

    @property
    def num_steps(self) -> int:
        """Number of steps that need prompts."""
        return max(TRIAL_STEPS, WARM_UP_STEPS + self.repetitions)


@dataclass(frozen=True)
class OwnWay:
    """Settings with which this project does a step."""

    train: TrainSizes
    gen: GenSizes
    threads_per_rank: int
    rows_per_micro_batch: int

    def __str__(self) -> str:
        threads = f"{self.threads_per_rank} thread{'s' * (self.threads_per_rank > 1)}"
        return f"{self.train} / {self.gen}, {threads} a rank, micro-batches of {self.rows_per_micro_batch}"


PRECISIONS = {"float32": "float32", "autocast": "bfloat16 by autocast", "weights": "bfloat16 weights"}
"""Precisions of TRL: float32 throughout; autocast to bfloat16, with float32 weights; or weights and optimizer state in
bfloat16, which is not equivalent, since an update of 1e-6 is lost in the rounding of a weight."""


@dataclass(frozen=True)
class TrlWay:
    """Settings with which TRL does a step, in one process with all cores and accumulated batches."""

    rows_per_batch: int
    precision: str = "float32"
    """One of `PRECISIONS`."""

    def __str__(self) -> str:
        return f"batches of {self.rows_per_batch}, {PRECISIONS[self.precision]}"


def own_ways(
    spec: StepSpec,
    num_cores: int,
    num_gpus: int = 0,
    train: TrainSizes | None = None,
    gen: GenSizes | None = None,
) -> list[OwnWay]:
    """Return the ways worth trying: the given sizes, or data-parallel replicas from one rank to one per core or GPU.

    Tensor shards are not tried by default: their communication costs more than it saves if the weights fit.
    """
    sizes = [train] if train else []
    num_ranks = 1
    while not train and num_ranks <= min(num_gpus or num_cores, spec.num_prompts):
        if spec.num_rows % num_ranks == 0:
            sizes.append(TrainSizes(1, 1, num_ranks))
        num_ranks *= 2
    return [
        OwnWay(tried, gen or GenSizes(1, 1), max(1, num_cores // tried.num_ranks), micro_rows)
        for tried in sizes
        for micro_rows in _cuts(spec.num_rows // tried.dp_size)
    ]


def trl_ways(spec: StepSpec, precision: str | None = None) -> list[TrlWay]:
    """Return the ways worth trying: the whole batch or a quarter of it at once, in `precision`; by default in float32 and
    for bfloat16 also with autocast, so that TRL uses the faster one."""
    precisions = [precision] if precision else list(PRECISIONS)[: 2 if spec.dtype == "bfloat16" else 1]
    return [TrlWay(rows, precision) for precision in precisions for rows in _cuts(spec.num_rows)]


def _cuts(rows: int) -> list[int]:
    return [rows, rows // 4] if rows % 4 == 0 and rows >= 8 else [rows]


@dataclass(frozen=True)
class StepTime:
    """Measurements of one step of one side."""

    seconds: float
    tokens: int
    """Number of prompt and response tokens, without padding."""
    phases: Mapping[str, float]
    """Seconds of the slowest rank, by phase."""


@dataclass(frozen=True)
class Side:
    """Counted steps of one side, in order, and the way chosen."""

    way: OwnWay | TrlWay
    steps: Sequence[StepTime]

    def figures(self) -> dict[str, Any]:
        seconds = [step.seconds for step in self.steps]
        phases = {
            name: statistics.median(step.phases[name] for step in self.steps) for name in self.steps[0].phases
        }
        return {
            "way": str(self.way),
            "tokens_per_s": statistics.median(step.tokens / step.seconds for step in self.steps),
            "step_s": statistics.median(seconds),
            "step_s_min": min(seconds),
            "step_s_max": max(seconds),
            "phases_s": dict(sorted(phases.items(), key=lambda phase: -phase[1])),
            "samples_step_s": seconds,
            "samples_tokens": [step.tokens for step in self.steps],
        }


def step_figures(spec: StepSpec, model: str, own: Side, trl: Side | None) -> dict[str, Any]:
    """Return the figures of a measurement of `model`, the name of its configuration. Units: seconds and tokens."""
    ours, theirs = own.figures(), trl.figures() if trl else None
    return {
        "model": model,
        **asdict(spec),
        "tokens_per_step": own.steps[0].tokens,
        "tokens_per_s": ours["tokens_per_s"],
        "trl_tokens_per_s": theirs["tokens_per_s"] if theirs else None,
        "ratio": ours["tokens_per_s"] / theirs["tokens_per_s"] if theirs else None,
        "phases_s": ours["phases_s"],
        "controller_overhead_share": statistics.median(
            step.phases[CONTROLLER] / step.seconds for step in own.steps
        ),
        "hybridengine": ours,
        "trl": theirs,
        "machine": machine_figures(),
    }
