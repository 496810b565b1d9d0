"""Domains compared with rectangles of layers and shards rank by rank, and with experts cut by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import pytest

from hybridengine.reshard.boxes import Box
from hybridengine.reshard.domains import domains
from hybridengine.reshard.layout import Layout, LocalParameter, Piece, Shard, ShardKey
from hybridengine.reshard.megatron import megatron_layout
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Coordinate, Grid, Groups
from hybridengine.topology.sizes import MODEL_AXES, GenSizes, TrainSizes
from tests.unit.numpy_shards import small_shape
from tests.unit.plan_cases import CASES, EXPERT_CASES, GENERAL, Case
from tests.unit.test_generation_grids import all_grids
from tests.unit.test_topology import ExpertSizes

SHAPE = small_shape()
SIDE = 720720
"""Number of layers and of shards in the plane: every degree up to 10 divides it."""


def part(index: int, count: int) -> tuple[int, int]:
    return index * SIDE // count, (index + 1) * SIDE // count


def layout(held: dict[int, tuple[ShardKey, dict[str, Box]]]) -> Layout:
    """Return a layout of boxes of tensors, one parameter each: rank -> (key, tensor -> box)."""

    def shard(boxes: dict[str, Box]) -> Shard:
        return Shard(
            tuple(
                LocalParameter(name, (), (Piece(name, box, (0,) * len(box)),)) for name, box in boxes.items()
            )
        )

    keys = {rank: key for rank, (key, _) in held.items()}
    return Layout(SHAPE, keys, {key: shard(boxes) for key, boxes in held.values()})


def rectangle(place: Coordinate, sizes: TrainSizes | GenSizes) -> Box:
    return part(place.pp_rank, sizes.pp_size), part(place.tp_rank, sizes.tp_size)


def plane(places: Iterable[Coordinate], sizes: TrainSizes | GenSizes) -> Layout:
    """Return a layout of one tensor whose rows are layers and whose columns are shards."""
    return layout(
        {rank: (place.along(MODEL_AXES), {"w": rectangle(place, sizes)}) for rank, place in enumerate(places)}
    )


def plane_domains(grid: GenerationGrid) -> Groups:
    return domains(plane(grid.train.coordinates(), grid.train.sizes), plane(grid.coordinates(), grid.sizes))


def touch(one: Box, other: Box) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def exchanging(grid: GenerationGrid) -> Groups:
    """Return groups of ranks of a training replica, linked if one generates with weights that the other trains."""
    train = [rectangle(place, grid.train.sizes) for place in grid.train.coordinates()]
    gen = [rectangle(place, grid.sizes) for place in grid.coordinates()]
    found = {rank: {rank} for rank in range(len(train))}
    for replica in grid.train.groups("pp", "tp"):
        for one, other in product(replica, repeat=2):
            if touch(gen[one], train[other]) and found[one] is not found[other]:
                merged = found[one] | found[other]
                found |= dict.fromkeys(merged, merged)
    return tuple(sorted({tuple(sorted(ranks)) for ranks in found.values()}))


@pytest.mark.parametrize("grouping", list(Grouping))
def test_domains_connect_the_ranks_that_exchange_something(grouping: Grouping) -> None:
    kinds = set()
    for grid in all_grids(8, grouping):
        found = plane_domains(grid)
        assert found == exchanging(grid), grid
        if grid.nests:
            assert found == grid.micro_dp_groups, grid
        kinds.add((grid.nests, len(found) == 1))
    assert kinds == set(product((False, True), repeat=2))


# Training, generation, domains.
WORKED = [
    ("2-4-1", "1-2", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("4-2-1", "2-1", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("1-2-2", "1-4", [[0], [1], [2], [3]]),  # an engine divides a training shard: nothing moves
    ("2-2-1", "1-4", [[0, 2], [1, 3]]),
    ("2-1-4", "1-4", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("1-3-2", "1-2", [[0, 1, 2], [3, 4, 5]]),  # an engine spans two replicas, and each replica serves itself
    ("1-1-2", "2-1", [[0], [1]]),
    ("2-2-1", "4-1", [[0, 1], [2, 3]]),
]


@pytest.mark.parametrize(("train", "gen", "expected"), WORKED)
def test_worked_examples(train: str, gen: str, expected: list[list[int]]) -> None:
    grid = GenerationGrid(Grid(TrainSizes.parse(train)), GenSizes.parse(gen))
    shape = small_shape(layers=8, kv_heads=12, vocab=190)
    found = domains(megatron_layout(shape, grid.train), vllm_layout(shape, grid))
    assert [list(group) for group in found] == expected
    assert found == plane_domains(grid)


@pytest.mark.parametrize(
    "case", [*CASES[::7], *(case for case in GENERAL if case not in EXPERT_CASES)], ids=str
)
def test_replicated_norms_and_tied_embeddings_connect_nothing_further(case: Case) -> None:
    found = domains(megatron_layout(case.shape, case.grid), vllm_layout(case.shape, case.generation))
    assert found == plane_domains(case.generation)


def test_a_further_axis_that_repeats_the_model_makes_more_replicas() -> None:
    grid = GenerationGrid(Grid(TrainSizes(1, 2, 2, cp_size=2)), GenSizes(1, 1))
    assert plane_domains(grid) == grid.train.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_engines_elsewhere_are_shared_out_among_the_replicas() -> None:
    train = plane(Grid(TrainSizes(1, 2, 2)).coordinates(), TrainSizes(1, 2, 2))
    whole = (0, SIDE), (0, SIDE)
    engines = layout({rank: ((0, 0), {"w": whole}) for rank in range(4, 8)})
    assert domains(train, engines) == ((0, 1, 4, 5), (2, 3, 6, 7))


EXPERTS = ("e0", "e1", "e2", "e3")


def held_by(tp: tuple[int, int], experts: Iterable[str], etp: tuple[int, int]) -> Iterator[tuple[str, Box]]:
    """Yield attention in shard tp, and some experts in shard etp: (index, count) each."""
    yield "attention", (part(*tp),)
    for name in experts:
        yield name, (part(*etp),)


def with_experts(grid: Grid, experts: Grid) -> Layout:
    """Return a layout whose keys are coordinates on two grids over the same ranks: tp on one, (ep, etp) on the other."""
    t, e, etp = grid.axes["tp"], experts.axes["ep"], experts.axes["tp"]
    held = {}
    for rank, (dense, own) in enumerate(zip(grid.coordinates(), experts.coordinates(), strict=True)):
        local = EXPERTS[own["ep"] * 4 // e : (own["ep"] + 1) * 4 // e]
        boxes = dict(held_by((dense["tp"], t), local, (own["tp"], etp)))
        held[rank] = ((dense["tp"], own["ep"], own["tp"]), boxes)
    return layout(held)


# (t, d), (etp, e), (t_g, whole experts in an engine of t_g ranks), domains.
MIXTURES = [
    ((1, 2), (1, 2), (1, True), [[0, 1]]),  # a replica of p·t ranks holds half of the experts
    ((1, 4), (1, 2), (1, True), [[0, 1], [2, 3]]),
    ((1, 4), (1, 4), (1, True), [[0, 1, 2, 3]]),
    ((2, 1), (1, 2), (2, True), [[0], [1]]),
    ((1, 2), (1, 2), (2, True), [[0], [1]]),
    ((2, 1), (1, 2), (2, False), [[0, 1]]),
    ((2, 2), (2, 1), (1, True), [[0, 1], [2, 3]]),
]


@pytest.mark.parametrize(("dense", "cut", "engine", "expected"), MIXTURES)
def test_experts_that_cut_the_same_ranks_anew(
    dense: tuple[int, int], cut: tuple[int, int], engine: tuple[int, bool], expected: list[list[int]]
) -> None:
    (t, d), (etp, e), (t_g, are_whole) = dense, cut, engine
    grid = Grid(TrainSizes(1, t, d))
    source = with_experts(grid, Grid(ExpertSizes(1, etp, t * d // (etp * e), ep_size=e)))
    held = {}
    for rank in range(t * d):
        tp = rank % t_g
        local = EXPERTS[tp * 4 // t_g : (tp + 1) * 4 // t_g] if are_whole else EXPERTS
        held[rank] = ((tp,), dict(held_by((tp, t_g), local, (0, 1) if are_whole else (tp, t_g))))
    assert [list(group) for group in domains(source, layout(held))] == expected
