"""Training and generation sizes that a model can have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hybridengine.errors import ConfigError, TopologyError
from hybridengine.models.shapes import ModelShape
from hybridengine.topology.fitting import gen_problems, train_problems
from hybridengine.topology.sizes import GenSizes, TrainSizes, divisors


def check_generates(shape: ModelShape) -> None:
    """Raise a ConfigError if `shape` has a score head instead of a vocabulary."""
    if shape.num_labels:
        raise ConfigError(
            "the model has a score head instead of a vocabulary; a switch to generation needs a language model"
        )


def check_layouts(shape: ModelShape, train: TrainSizes, gen: GenSizes | None = None) -> None:
    """Raise a TopologyError with all reasons why `shape` cannot train at `train` or generate at `gen` on its ranks."""
    if broken := train_problems(shape, train):
        raise TopologyError(f"training {train}: {'; '.join(broken)}")
    if gen is not None and (broken := [*gen.problems_over(train), *gen_problems(shape, gen, train.tp_size)]):
        raise TopologyError(f"generation {gen}: {'; '.join(broken)}")


def training_sizes(
    shape: ModelShape, num_ranks: int, max_tp_size: int, max_tokens: int, *, generates: bool = True
) -> Iterator[TrainSizes]:
    """Yield the sizes with which Megatron can train `shape` on `num_ranks` ranks; t and etp are at most `max_tp_size`.

    Context ranks have at least a token of the longest row, of `max_tokens` tokens, in each of their two parts. Virtual
    stages are blocks of equally many layers. Shards of experts are left out where as many parts would do: parts take no
    more time and memory. If the model `generates`, e = 1 and etp = t stay, whose shards nest in those of engines.
    """
    for model_ranks in divisors(num_ranks):
        for tp_size, cp_size in itertools.product(divisors(model_ranks), divisors(num_ranks // model_ranks)):
            pp_size = model_ranks // tp_size
            sizes = TrainSizes(pp_size, tp_size, num_ranks // model_ranks // cp_size, cp_size)
            dense = replace(sizes, expert_shards=1)
            if tp_size > max_tp_size or sizes.row_unit > max_tokens or train_problems(shape, dense):
                continue
            for one in _with_experts(shape, sizes, max_tp_size, generates):
                yield one
                if pp_size > 1 and shape.num_layers % pp_size == 0:
                    for virtual_stages in divisors(shape.num_layers // pp_size)[1:]:
                        yield replace(one, virtual_stages=virtual_stages)


def _with_experts(
    shape: ModelShape, sizes: TrainSizes, max_shards: int, generates: bool
) -> Iterator[TrainSizes]:
    """Yield the sizes with all parts and shards of experts; for a dense model, the sizes."""
    if (experts := shape.experts) is None:
        yield sizes
        return
    ranks = sizes.num_ranks // sizes.pp_size
    for shards, parts in itertools.product(divisors(ranks), divisors(ranks)):
        if shards > max_shards or ranks % (parts * shards) or shape.expert_problems(parts, shards):
            continue
        nests = generates and parts == 1 and shards == sizes.tp_size
        if nests or shards == 1 or experts.num_experts % (parts * shards):
            yield replace(sizes, expert_parts=parts, expert_shards=shards)


def generation_sizes(shape: ModelShape, train: TrainSizes, max_tp_size: int) -> Iterator[GenSizes]:
    """Yield the layouts of engines no larger than a replica or a node; t_g is at most `max_tp_size`, or t if larger."""
    widest = max(max_tp_size, train.tp_size)
    largest = max(train.model_parallel_size, max_tp_size)
    for num_ranks in divisors(train.num_ranks):
        if num_ranks > largest:
            return
        for tp_size in divisors(num_ranks):
            for expert_parts in sorted({1, tp_size}) if shape.experts else (1,):
                sizes = GenSizes(num_ranks // tp_size, tp_size, expert_parts)
                if (
                    tp_size <= widest
                    and not sizes.problems_over(train)
                    and not gen_problems(shape, sizes, train.tp_size)
                ):
                    yield sizes
