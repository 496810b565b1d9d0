"""Work of `hybridengine bench step`, the ways of doing it that each side may choose from, and its figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridengine.bench.machine import machine_figures
from hybridengine.topology.sizes import GenSizes, TrainSizes

TRIAL_STEPS = 3
"""Steps of each candidate; the first is not counted."""
WARM_UP_STEPS = 2
"""Steps of each side that are not counted, before they take turns."""
CONTROLLER = "controller"
"""Part of this project's steps in which no rank was in a call."""


@dataclass(frozen=True)
class StepSpec:
    """The work of a step, the same on both sides."""

    num_prompts: int
    samples_per_prompt: int
    response_tokens: int
    """Tokens of every response: nothing ends one earlier."""
    dtype: str
    """float32; or bfloat16: with master weights and optimizer state in float32, TRL by autocast or, if faster, not."""
    repetitions: int
    """Counted steps of each side."""
    timeout_s: float
    """Longest that a step may take, and that a side may take to start."""
    lr: float = 1e-6
    kl_coef: float = 0.02
    """Weight of the KL loss against the reference, by the k3 estimator."""

    @property
    def num_rows(self) -> int:
        """Sequences of a step."""
        return self.num_prompts * self.samples_per_prompt

    @property
    def num_steps(self) -> int:
        """Steps for which prompts are needed; trials begin with the first ones again."""
        return max(TRIAL_STEPS, WARM_UP_STEPS + self.repetitions)


@dataclass(frozen=True)
class OwnWay:
    """One way in which this project does a step."""

    train: TrainSizes
    gen: GenSizes
    threads_per_rank: int
    rows_per_micro_batch: int

    def __str__(self) -> str:
        threads = f"{self.threads_per_rank} thread{'s' * (self.threads_per_rank > 1)}"
        return f"{self.train} / {self.gen}, {threads} a rank, micro-batches of {self.rows_per_micro_batch}"


PRECISIONS = {"float32": "float32", "autocast": "bfloat16 by autocast", "weights": "bfloat16 weights"}
"""Precisions of TRL: float32 throughout; bfloat16 by autocast, with float32 weights; weights and optimizer state in
bfloat16, which is other training: an update of 1e-6 is lost in the rounding of a weight."""


@dataclass(frozen=True)
class TrlWay:
    """One way in which TRL does a step: one process with all cores, in so many accumulated batches."""

    rows_per_batch: int
    precision: str = "float32"
    """One of `PRECISIONS`."""

    def __str__(self) -> str:
        return f"batches of {self.rows_per_batch}, {PRECISIONS[self.precision]}"


def own_ways(spec: StepSpec, num_cores: int, num_gpus: int = 0) -> list[OwnWay]:
    """Return ways worth trying on a machine, whose ranks share its cores evenly.

    Data-parallel replicas with an engine each, because what tensor shards exchange at every layer costs more than it
    saves where weights fit; from one rank with all cores to one rank per core, or per GPU, in powers of two.
    """
    ways = []
    num_ranks = 1
    while num_ranks <= min(num_gpus or num_cores, spec.num_prompts) and spec.num_rows % num_ranks == 0:
        ways += [
            OwnWay(TrainSizes(1, 1, num_ranks), GenSizes(1, 1), num_cores // num_ranks, micro_rows)
            for micro_rows in _cuts(spec.num_rows // num_ranks)
        ]
        num_ranks *= 2
    return ways


def trl_ways(spec: StepSpec, rows_per_batch: int | None = None, precision: str | None = None) -> list[TrlWay]:
    """Return ways worth trying: the whole batch at once and a quarter at a time, or as given; precisions, or as given.

    With bfloat16, float32 is tried as well: TRL is held against what is faster for it, with float32 weights as ours.
    """
    precisions = [precision] if precision else list(PRECISIONS)[: 2 if spec.dtype == "bfloat16" else 1]
    cuts = _cuts(spec.num_rows) if rows_per_batch is None else [rows_per_batch]
    return [TrlWay(rows, precision) for precision in precisions for rows in cuts]


def _cuts(rows: int) -> list[int]:
    return [rows, rows // 4] if rows % 4 == 0 and rows >= 8 else [rows]


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

    def figures(self) -> dict[str, Any]:
        """Return the figures of the side: medians, and all samples."""
        seconds = [step.seconds for step in self.steps]
        phases = {
            name: statistics.median(step.phases[name] for step in self.steps) for name in self.steps[0].phases
        }
        return {
            "way": str(self.way),
            "trials": [{"way": str(way), "step_s": step_s} for way, step_s in self.trials],
            "tokens_per_s": statistics.median(step.tokens / step.seconds for step in self.steps),
            "step_s": statistics.median(seconds),
            "step_s_min": min(seconds),
            "step_s_max": max(seconds),
            "phases_s": dict(sorted(phases.items(), key=lambda phase: -phase[1])),
            "samples_step_s": seconds,
            "samples_tokens": [step.tokens for step in self.steps],
        }


def step_figures(spec: StepSpec, model: str, own: Side, trl: Side | None) -> dict[str, Any]:
    """Return the figures of a measurement; units: seconds and tokens.

    Args:
        model: name of the configuration with the model.
        trl: None where TRL was left out.
    """
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
