"""Which training and generation sizes a model can have on a number of ranks, and the nearest ones to those it cannot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from hybridengine.errors import ConfigError, TopologyError
from hybridengine.model_shapes import ModelShape
from hybridengine.topology.sizes import GenSizes, TrainSizes, divisors

NUM_SHOWN = 3
"""Nearest sizes named in a message."""


def check_generates(shape: ModelShape) -> None:
    """Check that `shape` is a model that generates.

    Raises:
        ConfigError: it has a score head.
    """
    if shape.num_labels:
        raise ConfigError(
            "the model has a score head instead of a vocabulary; a switch to generation needs a language model"
        )


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
    num_ranks = sizes.num_ranks
    found = [
        TrainSizes(model_parallel // t, t, num_ranks // model_parallel)
        for model_parallel in divisors(num_ranks)
        for t in divisors(model_parallel)
    ]

    def distance(other: TrainSizes) -> float:
        pairs = (
            (other.pp_size, sizes.pp_size),
            (other.tp_size, sizes.tp_size),
            (other.dp_size, sizes.dp_size),
        )
        return sum(abs(math.log(one / two)) for one, two in pairs)

    found.sort(key=lambda other: (distance(other), other))
    return list(islice((other for other in found if not train_problems(shape, other)), NUM_SHOWN))


def generation_sizes(shape: ModelShape, train: TrainSizes, max_tp_size: int) -> Iterator[GenSizes]:
    """Every generation layout that can be, of engines that are no larger than a training replica or than one node.

    Args:
        max_tp_size: largest t_g, e.g. the devices of a node, where t is not larger.
    """
    widest = max(max_tp_size, train.tp_size)
    largest = max(train.model_parallel_size, max_tp_size)
    for num_ranks in divisors(train.num_ranks):
        if num_ranks > largest:
            return
        for tp_size in divisors(num_ranks):
            sizes = GenSizes(num_ranks // tp_size, tp_size)
            if tp_size <= widest and not sizes.problems_over(train) and not gen_problems(shape, train, sizes):
                yield sizes
