"""Parallel sizes as the paper writes them: (p, t, d) for training, (p_g, t_g) for generation.

Source: HybridFlow, arXiv 2409.19256, section 5.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from hybridengine.errors import TopologyError

MAX_RANKS = 2**20
"""Most ranks of a layout: far beyond every cluster, and still planned in a minute."""


@dataclass(frozen=True, order=True)
class TrainSizes:
    """(p, t, d): pipeline stages, tensor shards, data-parallel replicas."""

    pp_size: int
    tp_size: int
    dp_size: int

    def __post_init__(self) -> None:
        _check_positive(self, ("pp_size", "tp_size", "dp_size"))
        _check_num_ranks("p·t·d", self.num_ranks)

    @classmethod
    def parse(cls, text: str) -> TrainSizes:
        """Sizes written as "p-t-d", e.g. "2-2-1"."""
        return cls(*_parse(text, 3, 'p-t-d such as "2-2-1"'))

    @property
    def num_ranks(self) -> int:
        return self.pp_size * self.tp_size * self.dp_size

    @property
    def model_parallel_size(self) -> int:
        """p·t: the ranks of one replica."""
        return self.pp_size * self.tp_size

    def __str__(self) -> str:
        return f"{self.pp_size}-{self.tp_size}-{self.dp_size}"


@dataclass(frozen=True, order=True)
class GenSizes:
    """(p_g, t_g): pipeline stages and tensor shards of one generation replica."""

    pp_size: int
    tp_size: int

    def __post_init__(self) -> None:
        _check_positive(self, ("pp_size", "tp_size"))
        _check_num_ranks("p_g·t_g", self.num_ranks)

    @classmethod
    def parse(cls, text: str) -> GenSizes:
        """Sizes written as "p_g-t_g", e.g. "1-2"."""
        return cls(*_parse(text, 2, 'p_g-t_g such as "1-2"'))

    @property
    def num_ranks(self) -> int:
        """p_g·t_g: the ranks of one engine."""
        return self.pp_size * self.tp_size

    def nests_in(self, train: TrainSizes) -> bool:
        """Whether p_g divides p and t_g divides t, so that training shards can be parts of generation shards."""
        return train.pp_size % self.pp_size == 0 and train.tp_size % self.tp_size == 0

    def micro_dp_size(self, train: TrainSizes) -> int:
        """d_g = p·t / (p_g·t_g): generation replicas inside one training replica.

        Raises:
            TopologyError: the sizes do not nest, so that a replica need not be a whole number of engines.
        """
        if not self.nests_in(train):
            raise TopologyError(
                f"generation {self} does not nest in training {train}, so that d_g is not defined;"
                " choose p_g from the divisors of p and t_g from those of t"
            )
        return train.model_parallel_size // self.num_ranks

    def problems_over(
        self, train: TrainSizes, is_possible: Callable[[GenSizes], bool] = lambda sizes: True
    ) -> list[str]:
        """Why engines of these sizes cannot share out the ranks of `train`; empty where they can.

        Args:
            is_possible: which sizes the remedy may name, as long as there are any.
        """
        if train.num_ranks % self.num_ranks == 0:
            return []
        choices = [str(sizes) for sizes in self.nearest_over(train, is_possible) or self.nearest_over(train)]
        return [
            f"an engine's p_g·t_g = {self.pp_size}·{self.tp_size} = {self.num_ranks} ranks do not divide the"
            f" {train.num_ranks} ranks of training {train}; choose p_g-t_g from {', '.join(choices)}"
        ]

    def nearest_over(
        self, train: TrainSizes, is_possible: Callable[[GenSizes], bool] = lambda sizes: True, count: int = 3
    ) -> list[GenSizes]:
        """Up to `count` other sizes whose engines share out the ranks of `train`, nearest first.

        Sizes at the same distance are ordered by whether they nest, then by p_g and t_g.
        """
        found = [
            GenSizes(pp_size, ranks // pp_size)
            for ranks in divisors(train.num_ranks)
            for pp_size in divisors(ranks)
        ]

        def distance(sizes: GenSizes) -> int:
            return abs(sizes.pp_size - self.pp_size) + abs(sizes.tp_size - self.tp_size)

        found.sort(key=lambda sizes: (distance(sizes), not sizes.nests_in(train), sizes))
        return list(islice((sizes for sizes in found if sizes != self and is_possible(sizes)), count))

    def __str__(self) -> str:
        return f"{self.pp_size}-{self.tp_size}"


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _parse(text: str, count: int, form: str) -> list[int]:
    shown = text if len(str(text)) <= 60 else f"{str(text)[:57]}..."
    if not re.fullmatch(r"[0-9]+(-[0-9]+)*", str(text)) or str(text).count("-") != count - 1:
        raise TopologyError(f"{shown!r} is not a parallel size; write {form}")
    parts = str(text).split("-")
    if max(map(len, parts)) > 20:  # int() refuses thousands of digits
        raise TopologyError(f"{shown!r} is beyond {MAX_RANKS} ranks; choose smaller sizes")
    return [int(part) for part in parts]


def _check_positive(sizes: object, fields: tuple[str, ...]) -> None:
    for field in fields:
        value = getattr(sizes, field)
        if type(value) is not int or value < 1:  # True is an int, and no size
            form = "p-t-d" if len(fields) == 3 else "p_g-t_g"
            raise TopologyError(
                f"{field}={value!r} must be a positive integer; choose at least 1 for each of {form}"
            )


def _check_num_ranks(name: str, num_ranks: int) -> None:
    if num_ranks > MAX_RANKS:
        raise TopologyError(f"{name} = {num_ranks} ranks must be at most {MAX_RANKS}; choose smaller sizes")
