"""Parallel sizes as the paper writes them: (p, t, d) for training, (p_g, t_g) for generation.

Source: HybridFlow, arXiv 2409.19256, section 5.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybridengine.errors import TopologyError


@dataclass(frozen=True, order=True)
class TrainSizes:
    """(p, t, d): pipeline stages, tensor shards, data-parallel replicas."""

    pp_size: int
    tp_size: int
    dp_size: int

    def __post_init__(self) -> None:
        _check_positive(self, ("pp_size", "tp_size", "dp_size"))

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

    @classmethod
    def parse(cls, text: str) -> GenSizes:
        """Sizes written as "p_g-t_g", e.g. "1-2"."""
        return cls(*_parse(text, 2, 'p_g-t_g such as "1-2"'))

    @property
    def num_ranks(self) -> int:
        """p_g·t_g: the ranks of one engine."""
        return self.pp_size * self.tp_size

    def problems_inside(self, train: TrainSizes) -> list[str]:
        """Why these sizes do not nest in `train` (p_g | p and t_g | t); empty where they do."""
        problems = []
        for axis, inner, outer in (
            ("p", self.pp_size, train.pp_size),
            ("t", self.tp_size, train.tp_size),
        ):
            if outer % inner:
                divisors = [str(n) for n in range(1, outer + 1) if outer % n == 0]
                problems.append(
                    f"{axis}_g={inner} does not divide {axis}={outer} (training {train}, generation {self});"
                    f" choose {axis}_g from {', '.join(divisors)}"
                )
        return problems

    def micro_dp_size(self, train: TrainSizes) -> int:
        """d_g = p·t / (p_g·t_g): generation replicas inside one training replica.

        Raises:
            TopologyError: the sizes do not nest.
        """
        problems = self.problems_inside(train)
        if problems:
            raise TopologyError("; ".join(problems))
        return train.model_parallel_size // self.num_ranks

    def __str__(self) -> str:
        return f"{self.pp_size}-{self.tp_size}"


def _parse(text: str, count: int, form: str) -> list[int]:
    if not re.fullmatch(r"\d+(-\d+)*", str(text)) or str(text).count("-") != count - 1:
        raise TopologyError(f"{text!r} is not a parallel size; write {form}")
    return [int(part) for part in str(text).split("-")]


def _check_positive(sizes: object, fields: tuple[str, ...]) -> None:
    for field in fields:
        value = getattr(sizes, field)
        if type(value) is not int or value < 1:  # True is an int, and no size
            raise TopologyError(f"{field}={value!r} must be a positive integer")
