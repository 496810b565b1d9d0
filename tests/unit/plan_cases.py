"""Cases of plans, what their ranks must hold, and an executor on numpy arrays that forgives nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from hybridengine.model_shapes import ModelShape
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.plan import Move, Place, Plan
from hybridengine.reshard.planner import compile_plan
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import GenSizes, TrainSizes
from tests.unit.numpy_shards import (
    Arrays,
    megatron_reference,
    numbered,
    small_shape,
    vllm_reference,
)

FLOAT32 = 4
FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Case:
    """A model under a training and a generation layout, and what its ranks must hold in both."""

    shape: ModelShape
    train: str
    gen: str
    order: RankOrder = RankOrder.PAPER

    @property
    def grid(self) -> Grid:
        return Grid(TrainSizes.parse(self.train), self.order)

    @property
    def generation(self) -> GenerationGrid:
        return GenerationGrid(self.grid, GenSizes.parse(self.gen))

    def plans(self, bucket_elements: int = 400) -> list[Plan]:
        """One plan for every micro-DP group."""
        source, destination = megatron_layout(self.shape, self.grid), vllm_layout(self.shape, self.generation)
        return [
            compile_plan(source, destination, group, bucket_elements)
            for group in self.generation.micro_dp_groups
        ]

    def training(self, rank: int) -> Arrays:
        """Reference: the parameters of `rank` while training."""
        place, sizes = self.grid.coordinate(rank), self.grid.sizes
        tensors = numbered(self.shape)
        return megatron_reference(
            self.shape, tensors, place.pp_rank, sizes.pp_size, place.tp_rank, sizes.tp_size
        )

    def generating(self, rank: int) -> Arrays:
        """Reference: the parameters of `rank` while generating."""
        p, gen, place = self.grid.sizes.pp_size, self.generation.sizes, self.generation.coordinate(rank)
        tensors = numbered(self.shape)
        return vllm_reference(self.shape, tensors, place.pp_rank, p, gen.pp_size, place.tp_rank, gen.tp_size)

    def __str__(self) -> str:
        tied = "tied" if self.shape.tied_embeddings else "untied"
        return f"{self.shape.family} {tied} {self.train} -> {self.gen} {self.order.value}"


def fitting_shape(family: str, tied: bool, p: int, t: int) -> ModelShape:
    """A model that t shards: uneven stages, a padded vocabulary that no degree divides and no empty share."""
    kv_heads = t if t in (3, 5, 6, 7, 8) else 4
    return small_shape(family, tied=tied, vocab=64 * t - 3, layers=p + (p > 1), kv_heads=kv_heads)


def nested_cases() -> list[Case]:
    """Every nested pair on up to 8 ranks; families, ties and rank orders take turns."""
    cases: list[Case] = []
    counts = range(1, 9)
    for p, t, d in (sizes for sizes in product(counts, repeat=3) if math.prod(sizes) <= 8):
        for p_g, t_g in product(range(1, p + 1), range(1, t + 1)):
            if p % p_g == 0 and t % t_g == 0:
                turn = len(cases)
                shape = fitting_shape(FAMILIES[turn % 3], turn % 2 == 0, p, t)
                cases.append(Case(shape, f"{p}-{t}-{d}", f"{p_g}-{t_g}", list(RankOrder)[turn // 2 % 2]))
    return cases


CASES = nested_cases()
every_nested_pair = pytest.mark.parametrize("case", CASES, ids=str)
FEW = [
    Case(fitting_shape(family, tied, p, t), f"{p}-{t}-1", gen)
    for family, tied in product(FAMILIES, (False, True))
    for p, t, gen in ((2, 2, "1-1"), (1, 4, "1-2"), (4, 2, "2-1"), (2, 4, "2-2"), (2, 4, "1-4"))
]


def at(place: Place, move: Move) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(place.offset, move.shape, strict=True))


def execute(plan: Plan, held: dict[int, Arrays]) -> dict[int, Arrays]:
    """Carry out a plan as ranks would: a parameter appears, and vanishes, with the bucket that says so.

    `held` loses what the plan releases. A move from or to a parameter without memory is a KeyError.

    Raises:
        AssertionError: an element is written twice, or a filled parameter had appeared before.
    """
    made: dict[int, Arrays] = {rank: {} for rank in plan.ranks}
    shapes = {
        rank: {name: parameter.shape for name, parameter in plan.destination.shard(rank).by_name.items()}
        for rank in plan.ranks
        if rank in plan.destination.keys
    }
    for bucket in plan.buckets:
        for rank, names in bucket.destinations.items():
            for name in names:
                assert name not in made[rank], f"rank {rank} fills {name} in two buckets"
                made[rank][name] = np.zeros(shapes[rank][name], dtype=np.int64)
        for move in bucket.moves:
            source, target = move.source, move.destination
            box = held[source.rank][source.parameter][at(source, move)]
            there = made[target.rank][target.parameter][at(target, move)]
            assert box.shape == there.shape == move.shape, move
            assert box.all(), f"{move} carries padding"
            assert not there.any(), f"{move} writes what another move has written"
            there[...] = box
        for rank, names in bucket.sources.items():
            for name in names:
                del held[rank][name]
    return made


def elements(local: Arrays) -> np.ndarray:
    """Numbers of all elements that a rank holds, without padding."""
    return np.unique(np.concatenate([values.ravel() for values in local.values()] + [np.array([0])]))[1:]
