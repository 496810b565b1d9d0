"""Parallel sizes as the paper writes them: (p, t, d) for training, (p_g, t_g) for generation.

The fields of `TrainSizes` named `{axis}_size` are the training axes. To add an axis, add such a field, and the letter by
which it is written to `NAMED`. The number of ranks, grids, coordinates, groups and messages follow from it.

Source: HybridFlow, arXiv 2409.19256, section 5.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import ClassVar, Self

from hybridengine.errors import TopologyError

MODEL_AXES = ("pp", "tp")
"""Axes that shard the model, outermost first: ranks with the same index in all of them hold the same weights."""
ROW_AXIS = "dp"
"""The axis over which the rows of a batch are split; ranks that differ along other axes work on the same rows."""
MAX_RANKS = 2**20
"""Largest number of ranks in a layout: far beyond any cluster, and still planned within a minute."""


@dataclass(frozen=True, order=True)
class Sizes:
    """Size of every axis; a subclass names its axes by its fields, `{axis}_size`, in the written order.

    A field in `named` has the default 1, and is written by its letter only if it is larger.

    Raises TopologyError if a size is not a positive integer, or if there are too many ranks.
    """

    form: ClassVar[str]
    """Written form of the sizes: "p-t-d"."""
    example: ClassVar[str]
    named: ClassVar[dict[str, str]] = {}
    """Field -> letter of the sizes that follow the written form: "2-2-1 c=2"."""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if type(size) is not int or size < 1:  # bool is a subclass of int
                letter = self.named.get(field.name)
                remedy = "at least 1" if letter else f"at least 1 for each of {self.form}"
                raise TopologyError(
                    f"{letter or field.name}={size!r} must be a positive integer; choose {remedy}"
                )
        if self.num_ranks > MAX_RANKS:
            raise TopologyError(
                f"{self.product} = {self.num_ranks} ranks must be at most {MAX_RANKS}; choose smaller sizes"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the sizes written in `form`, such as `example`, followed by named ones."""
        shown = text if len(str(text)) <= 60 else f"{str(text)[:57]}..."
        written, *rest = str(text).split() or [""]
        parts, letters = written.split("-"), {letter: name for name, letter in cls.named.items()}
        pairs = [part.partition("=")[::2] for part in rest]
        named = {letters[letter]: number for letter, number in pairs if letter in letters}
        numbers = [*parts, *named.values()]
        if (
            not all(re.fullmatch(r"[0-9]+", number) for number in numbers)
            or len(parts) != cls.form.count("-") + 1
            or len(named) != len(rest)
        ):
            more = (
                f' or "{" ".join([cls.example, *(f"{letter}=2" for letter in letters)])}"' if letters else ""
            )
            raise TopologyError(
                f'{shown!r} is not a parallel size; write {cls.form} such as "{cls.example}"{more}'
            )
        if max(map(len, numbers)) > 20:  # int() rejects strings of thousands of digits
            raise TopologyError(f"{shown!r} is beyond {MAX_RANKS} ranks; choose smaller sizes")
        return cls(*map(int, parts), **{name: int(number) for name, number in named.items()})

    @classmethod
    @cache
    def axes(cls) -> tuple[str, ...]:
        """Return the names of the axes, those of the written form first."""
        names = [field.name for field in fields(cls)]
        return tuple(name.removesuffix("_size") for name in names if name.endswith("_size"))

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield (axis, size) for every axis."""
        return ((axis, self[axis]) for axis in self.axes())

    def __getitem__(self, axis: str) -> int:
        return getattr(self, f"{axis}_size")

    @cached_property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.items())

    @property
    def product(self) -> str:
        """Number of ranks in symbols: "p·t·d", or "p·t·d·c" where there are context-parallel ranks."""
        more = [
            letter
            for name, letter in self.named.items()
            if name.endswith("_size") and getattr(self, name) > 1
        ]
        return "·".join([*self.form.split("-"), *more])

    @property
    def factors(self) -> str:
        """Number of ranks as a product: "2·2·1"."""
        written = self.form.count("-") + 1
        return "·".join(
            str(size) for place, (_, size) in enumerate(self.items()) if place < written or size > 1
        )

    def __str__(self) -> str:
        written = [str(size) for _, size in self.items()][: self.form.count("-") + 1]
        named = [
            f" {letter}={getattr(self, name)}"
            for name, letter in self.named.items()
            if getattr(self, name) != self._usual(name)
        ]
        return "-".join(written) + "".join(named)

    def _usual(self, name: str) -> int:
        """Return the size of a field in `named` that is not written."""
        return 1


@dataclass(frozen=True, order=True)
class TrainSizes(Sizes):
    """(p, t, d): pipeline stages, tensor shards, data-parallel replicas; unless named, c, v and e are 1, and etp is t.

    Mixture-of-experts layers divide the t·d·c ranks of a stage in their own way: e parts of the experts, each expert over
    etp ranks.

    Raises TopologyError for virtual stages without a pipeline, or for e·etp that do not divide the ranks of a stage.
    """

    form = "p-t-d"
    example = "2-2-1"
    named: ClassVar[dict[str, str]] = {
        "cp_size": "c",
        "virtual_stages": "v",
        "expert_parts": "e",
        "expert_shards": "etp",
    }
    pp_size: int
    tp_size: int
    dp_size: int
    cp_size: int = 1
    """Ranks that share the tokens of every row."""
    virtual_stages: int = 1
    """Blocks of layers of each pipeline stage, for the interleaved schedule: block k of stage s is block k·p + s."""
    expert_parts: int = 1
    """Parts into which the experts of a layer are divided."""
    expert_shards: int = 0
    """Tensor shards of an expert; 0 for as many as other weights have."""

    def __post_init__(self) -> None:
        if self.expert_shards == 0:
            object.__setattr__(self, "expert_shards", self.tp_size)
        super().__post_init__()
        both, ranks = self.expert_parts * self.expert_shards, self.num_ranks // self.pp_size
        if ranks % both:
            raise TopologyError(
                f"e·etp = {self.expert_parts}·{self.expert_shards} = {both} does not divide the {ranks} ranks of a"
                f" stage of {self}; choose e·etp from {', '.join(map(str, divisors(ranks)))}"
            )
        if self.virtual_stages > 1 and self.pp_size == 1:
            raise TopologyError(
                f"v={self.virtual_stages} virtual stages need pipeline stages, and p=1; choose p of at least 2, or v=1"
            )

    @cached_property
    def model_parallel_size(self) -> int:
        """p·t: the ranks with different weights."""
        return math.prod(self[axis] for axis in MODEL_AXES)

    def _usual(self, name: str) -> int:
        return self.tp_size if name == "expert_shards" else 1

    @property
    def replica_size(self) -> int:
        """p·t·c: the ranks that train on the same rows."""
        return self.num_ranks // self.dp_size

    @property
    def expert_replicas(self) -> int:
        """t·d·c / (e·etp): the ranks of a stage that hold the same shards of experts."""
        return self.num_ranks // (self.pp_size * self.expert_parts * self.expert_shards)

    @property
    def shares_experts(self) -> bool:
        """True if replicas compute with one another's experts, so that they must take part in the same passes."""
        return self.tp_size * self.cp_size % (self.expert_parts * self.expert_shards) != 0

    @property
    def row_unit(self) -> int:
        """Number of which the tokens of each row are a multiple, by padding: 2c with context-parallel ranks."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    def num_passes(self, num_micro_batches: int) -> int:
        """Return the micro-batches that the stages compute: the interleaved schedule fills fewer than p up to p."""
        return max(num_micro_batches, self.pp_size) if self.virtual_stages > 1 else num_micro_batches

    def passes_per_block(self, num_micro_batches: int) -> int:
        """Return the micro-batches that a block of layers of the interleaved schedule computes before the next one does.

        They are at least p, as few as leave no rest below p: Megatron-core's rule.
        """
        p = self.pp_size
        return next(size for size in range(p, num_micro_batches + 1) if not 0 < num_micro_batches % size < p)

    def passes_in_flight(self, num_micro_batches: int, stage: int) -> int:
        """Return the number of passes of a block of layers that a stage begins before it ends its first backward pass."""
        p, v = self.pp_size, self.virtual_stages
        if v == 1:
            return min(p - stage, num_micro_batches)
        count = self.num_passes(num_micro_batches)
        return min(2 * (p - stage) - 1 + (v - 1) * self.passes_per_block(count), count * v)

    @property
    def blocks(self) -> tuple[int, str]:
        """(p·v, its name): the number of blocks of layers that the model is cut into."""
        return self.pp_size * self.virtual_stages, "p" if self.virtual_stages == 1 else "p·v"


@dataclass(frozen=True, order=True)
class GenSizes(Sizes):
    """(p_g, t_g): pipeline stages and tensor shards of one engine of `num_ranks` ranks.

    As vLLM can do it, each expert is sharded over the t_g ranks, or the experts are divided into e_g = t_g parts.

    Raises TopologyError for another number of parts.
    """

    form = "p_g-t_g"
    example = "1-2"
    named: ClassVar[dict[str, str]] = {"expert_parts": "e"}
    pp_size: int
    tp_size: int
    expert_parts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expert_parts not in (1, self.tp_size):
            raise TopologyError(
                f"e={self.expert_parts} must be 1 (each expert sharded over t_g ranks) or t_g={self.tp_size} (whole"
                " experts); choose one of them"
            )

    @property
    def expert_shards(self) -> int:
        """Tensor shards of an expert."""
        return self.tp_size // self.expert_parts

    def nests_in(self, train: TrainSizes) -> bool:
        """True if p_g divides p and t_g divides t, so that training shards can be parts of generation shards.

        Virtual stages of a rank are in different generation stages, unless there is only one.
        """
        divides = all(train[axis] % self[axis] == 0 for axis in MODEL_AXES)
        return divides and (self.pp_size == 1 or train.virtual_stages == 1)

    def problems_over(self, train: TrainSizes) -> list[str]:
        """Return the reasons why engines of these sizes cannot divide the ranks of `train` among them."""
        if train.num_ranks % self.num_ranks == 0:
            return []
        return [
            f"an engine's {self.product} = {self.pp_size}·{self.tp_size} = {self.num_ranks} ranks do not divide the"
            f" {train.num_ranks} ranks of training {train}; choose {self.product} from"
            f" {', '.join(map(str, divisors(train.num_ranks)))}"
        ]


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
