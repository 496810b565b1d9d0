"""Which training and generation sizes a model can have on a number of ranks, and the nearest ones to those it cannot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hybridengine.errors import ConfigError, TopologyError
from hybridengine.model_shapes import ModelShape
from hybridengine.topology.sizes import GenSizes, TrainSizes

NUM_SHOWN = 3
"""Nearest sizes named in a message."""


def check_layouts(shape: ModelShape, train: TrainSizes, gen: GenSizes | None = None) -> None:
    """Check that `shape` can train at `train` and, where it is given, generate at `gen` on the same ranks.

    Raises:
        TopologyError: everything that is wrong, with the nearest sizes that can be.
    """
    broken = train_problems(shape, train)
    if broken:
        nearest = nearest_train_sizes(shape, train)
        raise TopologyError(f"training {train}: {_with_nearest(broken, 'p-t-d', nearest)}")
    if gen is None:
        return

    def possible(sizes: GenSizes) -> bool:
        return not gen_problems(shape, train, sizes)

    for problem in gen.problems_over(train, possible):
        raise TopologyError(f"generation {gen}: {problem}")
    broken = gen_problems(shape, train, gen)
    if broken:
        nearest = gen.nearest_over(train, possible, NUM_SHOWN)
        raise TopologyError(f"generation {gen}: {_with_nearest(broken, 'p_g-t_g', nearest)}")


def _with_nearest(problems: list[str], form: str, nearest: Sequence[object]) -> str:
    hint = [f"the nearest {form} that can be: {', '.join(map(str, nearest))}"] if nearest else []
    return "; ".join([*problems, *hint])


def train_problems(shape: ModelShape, sizes: TrainSizes) -> list[str]:
    """Why Megatron cannot train `shape` at these sizes; empty where it can."""
    problems = shape.tp_problems(sizes.tp_size)
    try:
        shape.split_layers(sizes.pp_size)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def gen_problems(shape: ModelShape, train: TrainSizes, sizes: GenSizes) -> list[str]:
    """Why vLLM cannot hold `shape` at these sizes; empty where it can."""
    return shape.gen_pp_problems(sizes.pp_size) + shape.gen_tp_problems(sizes.tp_size, train.tp_size)


def nearest_train_sizes(shape: ModelShape, sizes: TrainSizes) -> list[TrainSizes]:
    """Sizes that can be, on the same number of ranks, those first that change the fewest factors."""
    divisors = _divisors(sizes.num_ranks)
    found = [
        TrainSizes(p, t, sizes.num_ranks // (p * t))
        for p in divisors
        for t in divisors
        if sizes.num_ranks % (p * t) == 0
    ]

    def distance(other: TrainSizes) -> float:
        pairs = (
            (other.pp_size, sizes.pp_size),
            (other.tp_size, sizes.tp_size),
            (other.dp_size, sizes.dp_size),
        )
        return sum(abs(math.log(one / two)) for one, two in pairs)

    possible = [other for other in found if not train_problems(shape, other)]
    return sorted(possible, key=lambda other: (distance(other), other))[:NUM_SHOWN]


def generation_sizes(shape: ModelShape, train: TrainSizes, max_tp_size: int) -> Iterator[GenSizes]:
    """Every generation layout that can be and whose stages nest in training's: p_g | p, and t_g | t or t | t_g.

    Args:
        max_tp_size: largest t_g beyond t, e.g. the devices of a node.
    """
    for pp_size in _divisors(train.pp_size):
        for tp_size in range(1, max(max_tp_size, train.tp_size) + 1):
            sizes = GenSizes(pp_size, tp_size)
            shares = train.tp_size % tp_size == 0 or tp_size % train.tp_size == 0
            if shares and not sizes.problems_over(train) and not gen_problems(shape, train, sizes):
                yield sizes


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
