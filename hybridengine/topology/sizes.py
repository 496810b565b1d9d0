"""Parallel sizes as the paper writes them: (p, t, d) for training, (p_g, t_g) for generation.

The fields of `TrainSizes` are the training axes. To add an axis, add a field: `cp_size: int = 1`. The number of ranks,
grids, coordinates, groups, rank orders and messages follow from it.

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

    A field whose default is 1 is written, by name, only if it is larger. Raises TopologyError if a size is not a
    positive integer, or if there are too many ranks.
    """

    form: ClassVar[str]
    """Written form of the sizes: "p-t-d"."""
    example: ClassVar[str]

    def __post_init__(self) -> None:
        for axis, size in self.items():
            if type(size) is not int or size < 1:  # bool is a subclass of int
                raise TopologyError(
                    f"{axis}_size={size!r} must be a positive integer; choose at least 1 for each of {self.form}"
                )
        if self.num_ranks > MAX_RANKS:
            raise TopologyError(
                f"{self.product} = {self.num_ranks} ranks must be at most {MAX_RANKS}; choose smaller sizes"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the sizes written in `form`, such as `example`."""
        shown = text if len(str(text)) <= 60 else f"{str(text)[:57]}..."
        if not re.fullmatch(r"[0-9]+(-[0-9]+)*", str(text)) or str(text).count("-") != cls.form.count("-"):
            raise TopologyError(f'{shown!r} is not a parallel size; write {cls.form} such as "{cls.example}"')
        parts = str(text).split("-")
        if max(map(len, parts)) > 20:  # int() rejects strings of thousands of digits
            raise TopologyError(f"{shown!r} is beyond {MAX_RANKS} ranks; choose smaller sizes")
        return cls(*map(int, parts))

    @classmethod
    @cache
    def axes(cls) -> tuple[str, ...]:
        """Return the names of the axes, those of the written form first."""
        return tuple(field.name.removesuffix("_size") for field in fields(cls))

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
        """Number of ranks in symbols: "p·t·d"."""
        written = self.form.split("-")
        return "·".join([*written, *(axis[0] for axis in self.axes()[len(written) :])])

    def __str__(self) -> str:
        sizes, num_written = list(self.items()), self.form.count("-") + 1
        named = [f" {axis}={size}" for axis, size in sizes[num_written:] if size > 1]
        return "-".join([str(size) for _, size in sizes[:num_written]]) + "".join(named)


@dataclass(frozen=True, order=True)
class TrainSizes(Sizes):
    """(p, t, d): pipeline stages, tensor shards, data-parallel replicas."""

    form = "p-t-d"
    example = "2-2-1"
    pp_size: int
    tp_size: int
    dp_size: int

    @cached_property
    def model_parallel_size(self) -> int:
        """p·t: the ranks of one replica."""
        return math.prod(self[axis] for axis in MODEL_AXES)


@dataclass(frozen=True, order=True)
class GenSizes(Sizes):
    """(p_g, t_g): pipeline stages and tensor shards of one engine of `num_ranks` ranks."""

    form = "p_g-t_g"
    example = "1-2"
    pp_size: int
    tp_size: int

    def nests_in(self, train: TrainSizes) -> bool:
        """True if p_g divides p and t_g divides t, so that training shards can be parts of generation shards."""
        return all(train[axis] % self[axis] == 0 for axis in MODEL_AXES)

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
