"""What `hybridengine bench step` measures, and the ways of doing it that each side may choose from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybridengine.errors import raise_all
from hybridengine.topology.sizes import GenSizes, TrainSizes

MAX_REPETITIONS = 1_000
DTYPES = ("float32", "bfloat16")
TRIAL_STEPS = 3
"""Steps of each candidate, the least; the first is not counted."""
SHORT_TRIAL_STEPS, SHORT_TRIAL_S = 10, 5.0
"""Candidates with short steps, which noise weighs on more, get more steps until so many seconds have passed."""
HOPELESS = 3.0
"""A candidate with long steps gets no other after one that takes so many times the best so far."""
WARM_UP_STEPS = 2
"""Steps of each side that are not counted, before they take turns."""


@dataclass(frozen=True)
class StepSpec:
    """The work of a step, the same on both sides.

    Raises:
        ConfigError: values that cannot be.
    """

    num_prompts: int
    samples_per_prompt: int
    response_tokens: int
    """Of every response: nothing ends one earlier."""
    dtype: str
    """float32; or bfloat16: with master weights and optimizer state in float32, TRL by autocast or, if faster, not."""
    repetitions: int
    """Counted steps of each side."""
    timeout_s: float
    """Longest that a step may take, and that a side may take to start."""
    lr: float = 1e-6
    kl_coef: float = 0.02
    """Weight of the KL loss against the reference, by the k3 estimator."""

    def __post_init__(self) -> None:
        raise_all(self._problems())

    @property
    def num_rows(self) -> int:
        """Sequences of a step."""
        return self.num_prompts * self.samples_per_prompt

    @property
    def num_steps(self) -> int:
        """Steps for which prompts are needed; trials begin with the first ones again."""
        return WARM_UP_STEPS + self.repetitions + SHORT_TRIAL_STEPS

    def _problems(self) -> Iterable[str]:
        for option, value, least, most in (
            ("--prompts", self.num_prompts, 1, 65_536),
            ("--samples", self.samples_per_prompt, 2, 1024),
            ("--response-tokens", self.response_tokens, 1, 65_536),
            ("--repetitions", self.repetitions, 1, MAX_REPETITIONS),
        ):
            if not least <= value <= most:
                yield f"{option} {value} is out of range; choose {least} to {most}"
        if self.dtype not in DTYPES:
            yield f"--dtype {self.dtype} is not known; choose {' or '.join(DTYPES)}"
        if not 10 <= self.timeout_s <= 86400:
            yield f"--timeout {self.timeout_s:g} is out of range; choose 10 to 86400 seconds"


@dataclass(frozen=True)
class OwnWay:
    """How this project does a step."""

    train: TrainSizes
    gen: GenSizes
    threads_per_rank: int
    rows_per_micro_batch: int

    def __str__(self) -> str:
        threads = f"{self.threads_per_rank} thread{'s' * (self.threads_per_rank > 1)}"
        return f"{self.train} / {self.gen}, {threads} a rank, micro-batches of {self.rows_per_micro_batch}"

    def as_dict(self) -> dict[str, str | int]:
        """For programs."""
        return {
            "parallel": str(self.train),
            "generate": str(self.gen),
            "num_ranks": self.train.num_ranks,
            "threads_per_rank": self.threads_per_rank,
            "rows_per_micro_batch": self.rows_per_micro_batch,
        }


PRECISIONS = ("float32", "autocast", "weights")
"""Of TRL: float32 throughout; bfloat16 by autocast, with float32 weights; weights and optimizer state in bfloat16, which
is other training: an update of 1e-6 is lost in the rounding of a weight."""


@dataclass(frozen=True)
class TrlWay:
    """How TRL does a step: one process with all cores, in so many accumulated batches."""

    rows_per_batch: int
    precision: str = "float32"
    """One of `PRECISIONS`."""

    def __str__(self) -> str:
        kind = {"float32": "float32", "autocast": "bfloat16 by autocast", "weights": "bfloat16 weights"}
        return f"batches of {self.rows_per_batch}, {kind[self.precision]}"

    def as_dict(self) -> dict[str, str | int]:
        """For programs."""
        return {"per_device_train_batch_size": self.rows_per_batch, "precision": self.precision}


def own_ways(spec: StepSpec, num_cores: int, num_gpus: int = 0) -> list[OwnWay]:
    """Ways worth trying on a machine, whose ranks share its cores evenly.

    Data-parallel replicas with an engine each, because what tensor shards exchange at every layer costs more than it
    saves where weights fit; from one rank with all cores to one rank per core, or per GPU, in powers of two.
    """
    ways = []
    num_ranks = 1
    while num_ranks <= min(num_gpus or num_cores, spec.num_prompts) and spec.num_rows % num_ranks == 0:
        rows = spec.num_rows // num_ranks
        ways += [
            OwnWay(TrainSizes(1, 1, num_ranks), GenSizes(1, 1), num_cores // num_ranks, micro_rows)
            for micro_rows in _cuts(rows)
        ]
        num_ranks *= 2
    return ways


def trl_ways(spec: StepSpec, rows_per_batch: int | None = None, precision: str | None = None) -> list[TrlWay]:
    """Ways worth trying: the whole batch at once, and a quarter at a time, or as given; and precisions, or as given.

    With bfloat16, float32 is tried as well: TRL is held against what is faster for it, with float32 weights as ours.
    """
    precisions = [precision] if precision else PRECISIONS[: 2 if spec.dtype == "bfloat16" else 1]
    cuts = _cuts(spec.num_rows) if rows_per_batch is None else [rows_per_batch]
    return [TrlWay(rows, precision) for precision in precisions for rows in cuts]


def _cuts(rows: int) -> list[int]:
    return [rows, rows // 4] if rows % 4 == 0 and rows >= 8 else [rows]
