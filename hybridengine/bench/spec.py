"""What a benchmark compares: one model, pairs of layouts, methods. Checked whole, before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from hybridengine.errors import TopologyError, raise_all
from hybridengine.metrics.formatting import format_bytes
from hybridengine.model_shapes import ModelShape
from hybridengine.planning.layouts import check_generates, check_layouts
from hybridengine.topology.sizes import GenSizes, TrainSizes


class MethodName(str, Enum):
    """The methods that can be compared, in the order in which they run."""

    MICRO_DP = "micro-dp"
    MODEL_PARALLEL = "model-parallel"
    FULL = "full"
    PER_TENSOR = "per-tensor"
    MEGATRON_CORE = "megatron-core"


VERIFY_TIMES = ("first", "always", "never")
"""When micro-dp's receivers check what they have received; values of `runtime.executor.Verify`, which needs torch."""

MAX_REPETITIONS = 10_000

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1.0, 86400.0

DTYPES = ("float32", "bfloat16")

DEFAULT_MODEL = ModelShape(
    family="llama",
    num_layers=8,
    hidden_size=512,
    ffn_hidden_size=1536,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=8192,
    max_positions=2048,
)
"""A Llama of 33.6 million parameters, 134 MB in float32, that shards at t = 4 and splits into 2, 4 or 8 stages.

Three quarters of its weights are those of layers; in a large model it is nearly all.
"""


@dataclass(frozen=True)
class LayoutPair:
    """Train at (p, t, d), generate at (p_g, t_g)."""

    train: TrainSizes
    gen: GenSizes

    @classmethod
    def parse(cls, text: str) -> LayoutPair:
        """A pair written as TRAIN:GEN, e.g. "2-4-1:1-2".

        Raises:
            TopologyError: another form.
        """
        train, separator, gen = text.partition(":")
        if not separator:
            raise TopologyError(f'{text!r} is not a pair of layouts; write TRAIN:GEN such as "2-4-1:1-2"')
        return cls(TrainSizes.parse(train), GenSizes.parse(gen))

    def __str__(self) -> str:
        return f"{self.train} -> {self.gen}"


@dataclass(frozen=True)
class BenchSpec:
    """One benchmark.

    Raises:
        ConfigError: a number out of range, or a model that generates nothing.
        TopologyError: layouts that cannot be, with the nearest that can.
    """

    shape: ModelShape
    pairs: tuple[LayoutPair, ...]
    methods: tuple[MethodName, ...] = tuple(MethodName)
    dtype: str = "float32"
    repetitions: int = 7
    """Counted repetitions; one more, which is not counted, warms up."""
    bucket_bytes: int = 16 * 2**20
    verify: str = "first"
    timeout_s: float = 120.0
    """Longest that any wait may take."""

    def __post_init__(self) -> None:
        check_generates(self.shape)
        raise_all(self._problems())
        raise_all(self._layout_problems(), TopologyError)

    @property
    def weight_bytes(self) -> int:
        """M: bytes of all weights."""
        return self.shape.weight_bytes(self.dtype)

    def describe(self, pair: LayoutPair) -> str:
        """One line that says what is about to be measured."""
        return (
            f"{pair}: {pair.train.num_ranks} ranks, {format_bytes(self.weight_bytes)} of {self.dtype} weights,"
            f" methods {', '.join(method.value for method in self.methods)}"
        )

    def _problems(self) -> Iterable[str]:
        if not 1 <= self.repetitions <= MAX_REPETITIONS:
            yield f"--repetitions {self.repetitions} is out of range; choose 1 to {MAX_REPETITIONS}"
        if self.bucket_bytes < 2**16:
            yield f"--bucket-bytes {self.bucket_bytes} is less than a message is worth; choose at least 65536"
        if not MIN_TIMEOUT_S <= self.timeout_s <= MAX_TIMEOUT_S:
            yield (
                f"--timeout {self.timeout_s:g} is out of range; choose {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g} seconds"
            )
        for name, value, known in (("dtype", self.dtype, DTYPES), ("verify", self.verify, VERIFY_TIMES)):
            if value not in known:
                yield f"{name} {value!r} does not exist; choose from {', '.join(known)}"

    def _layout_problems(self) -> Iterable[str]:
        for pair in self.pairs:
            try:
                check_layouts(self.shape, pair.train, pair.gen)
            except TopologyError as error:
                yield f"{pair}: {error}"
                continue
            if MethodName.MEGATRON_CORE in self.methods:
                # Its target is a Megatron model of the generation sizes.
                yield from (
                    f"{pair}: megatron-core: {problem}, or leave this method out with --methods"
                    for problem in self.shape.tp_problems(pair.gen.tp_size, "t_g")
                )


Choice = TypeVar("Choice", bound=Enum)


def parse_choices(text: str, choices: type[Choice], what: str) -> tuple[Choice, ...]:
    """Members of `choices` named in a comma-separated list, each once, in the order of `choices`.

    Raises:
        ConfigError: a name that does not exist, with the nearest that does; no name at all.
    """
    known = {choice.value: choice for choice in choices}
    names = [name.strip() for name in text.split(",") if name.strip()]
    problems = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            meant = f"did you mean {near[0]!r}? " if near else ""
            problems.append(f"{what} {name!r} does not exist; {meant}choose from {', '.join(known)}")
    if not names:
        problems.append(f"no {what} is named; choose from {', '.join(known)}")
    raise_all(problems)
    return tuple(choice for name, choice in known.items() if name in names)
