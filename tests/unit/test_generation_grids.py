"""Generation grids of any sizes up to 16 ranks: wider tensor parallelism, sizes that do not nest, vanilla grouping."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import chain, combinations, product

import pytest

from hybridengine.errors import TopologyError
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Coordinate, Grid, RankOrder
from hybridengine.topology.sizes import GenSizes, TrainSizes, divisors
from tests.unit.test_topology import MAX_RANKS, generation, nested_grids, sizes_up_to


@cache
def all_grids(num_ranks: int, grouping: Grouping) -> list[GenerationGrid]:
    """Return every generation grid over every training grid whose ranks its engines divide, in both rank orders."""
    return [
        GenerationGrid(train, GenSizes(p_g, t_g), grouping)
        for train in (
            Grid(TrainSizes(*sizes), order) for order in RankOrder for sizes in sizes_up_to(num_ranks)
        )
        for p_g in divisors(train.num_ranks)
        for t_g in divisors(train.num_ranks // p_g)
    ]


# Training, generation, generation TP groups: an engine spans ranks with the same training shard.
WIDER = [
    ("1-2-2", "1-4", [[0, 2, 1, 3]]),
    ("1-2-4", "1-4", [[0, 2, 1, 3], [4, 6, 5, 7]]),
    ("2-2-1", "1-4", [[0, 2, 1, 3]]),
    ("2-1-2", "2-2", [[0, 2], [1, 3]]),
    ("2-1-4", "1-4", [[0, 1, 2, 3], [4, 5, 6, 7]]),
]


@pytest.mark.parametrize(("train", "gen", "tp_groups"), WIDER)
def test_worked_examples_of_wider_tensor_parallelism(
    train: str, gen: str, tp_groups: list[list[int]]
) -> None:
    grid = generation(train, gen, "interval")
    assert [list(group) for group in grid.groups("tp")] == tp_groups


@pytest.mark.parametrize("grouping", list(Grouping))
def test_coordinates_are_a_bijection(grouping: Grouping) -> None:
    """Each engine has each of its places exactly once; vLLM needs this for all sizes."""
    count = 0
    for grid in all_grids(MAX_RANKS, grouping):
        places = [grid.coordinate(rank) for rank in range(grid.train.num_ranks)]
        p_g, t_g = grid.sizes.pp_size, grid.sizes.tp_size
        num_replicas = grid.train.num_ranks // (p_g * t_g)
        expected = product(range(num_replicas), range(p_g), range(t_g))
        assert sorted((at.replica_rank, at.pp_rank, at.tp_rank) for at in places) == list(expected), grid
        assert grid.num_replicas == num_replicas
        count += 1
    assert count > 500


@pytest.mark.parametrize("grouping", list(Grouping))
def test_groups_of_all_sizes_partition_the_ranks(grouping: Grouping) -> None:
    for grid in all_grids(MAX_RANKS, grouping):
        total, p_g, t_g = grid.train.num_ranks, grid.sizes.pp_size, grid.sizes.tp_size
        engines = [set(group) for group in grid.groups("tp", "pp")]
        for axes, size in ((("tp", "pp"), p_g * t_g), (("tp",), t_g), (("pp",), p_g)):
            groups = grid.groups(*axes)
            assert sorted(chain(*groups)) == list(range(total))
            assert all(len(group) == size for group in groups)
            assert all(any(set(group) <= engine for engine in engines) for group in groups)
        assert sorted(chain(*grid.micro_dp_groups)) == list(range(total))
        assert all(list(group) == sorted(group) for group in grid.micro_dp_groups)
        assert list(grid.micro_dp_groups) == sorted(grid.micro_dp_groups)


def test_groups_of_engines_are_in_the_order_of_their_coordinates() -> None:
    """vLLM uses the position in a group as the tensor-parallel or pipeline-parallel rank."""
    for grouping in Grouping:
        for grid in all_grids(MAX_RANKS, grouping):
            for group in grid.groups("tp"):
                assert [grid.coordinate(rank).tp_rank for rank in group] == list(range(grid.sizes.tp_size))
            for group in grid.groups("pp"):
                assert [grid.coordinate(rank).pp_rank for rank in group] == list(range(grid.sizes.pp_size))
        for grid in nested_grids(MAX_RANKS, grouping):
            for group in (*grid.groups("tp"), *grid.groups("pp")):
                assert list(group) == sorted(group)


Interval = tuple[Fraction, Fraction]


@cache
def interval(index: int, count: int) -> Interval:
    """Return part `index` of `count` equal parts of 1."""
    return Fraction(index, count), Fraction(index + 1, count)


def trained(grid: GenerationGrid, rank: int) -> tuple[Interval, Interval]:
    """Return the (layers, shard) that a rank trains, as parts of 1."""
    place, sizes = grid.train.coordinate(rank), grid.train.sizes
    return interval(place.pp_rank, sizes.pp_size), interval(place.tp_rank, sizes.tp_size)


def generated(grid: GenerationGrid, rank: int) -> tuple[Interval, Interval]:
    """Return the (layers, shard) that a rank generates with, as parts of 1."""
    place = grid.coordinate(rank)
    return interval(place.pp_rank, grid.sizes.pp_size), interval(place.tp_rank, grid.sizes.tp_size)


def is_inside(one: Interval, other: Interval) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]


def is_wider(grid: GenerationGrid) -> bool:
    """Return True if p_g divides p, and t divides a larger t_g."""
    train, gen = grid.train.sizes, grid.sizes
    return (
        train.pp_size % gen.pp_size == 0 and gen.tp_size % train.tp_size == 0 and gen.tp_size > train.tp_size
    )


def test_wider_shards_are_parts_of_the_training_shards() -> None:
    count = 0
    for grid in filter(is_wider, all_grids(MAX_RANKS, Grouping.INTERVAL)):
        for rank in range(grid.train.num_ranks):
            assert is_inside(generated(grid, rank)[1], trained(grid, rank)[1]), (grid, rank)
            assert is_inside(trained(grid, rank)[0], generated(grid, rank)[0]), (grid, rank)
        count += 1
    assert count > 100


@pytest.mark.parametrize("grouping", list(Grouping))
def test_shards_nest_where_every_training_shard_is_inside_the_generation_shard(grouping: Grouping) -> None:
    found = set()
    for grid in all_grids(MAX_RANKS, grouping):
        expected = all(
            is_inside(part, needed)
            for rank in range(grid.train.num_ranks)
            for part, needed in zip(trained(grid, rank), generated(grid, rank), strict=True)
        )
        assert grid.nests == expected, grid
        sizes_nest = (
            grid.train.sizes.pp_size % grid.sizes.pp_size == 0
            and grid.train.sizes.tp_size % grid.sizes.tp_size == 0
        )
        if grouping is Grouping.INTERVAL:
            assert grid.nests == sizes_nest, grid
        found.add((grid.nests, sizes_nest))
    vanilla_loses = {(False, True)} if grouping is Grouping.VANILLA else set()
    assert found == {(True, True), (False, False)} | vanilla_loses


def test_engines_of_other_sizes_are_consecutive_ranks_in_the_papers_order() -> None:
    for grouping in Grouping:
        for grid in all_grids(MAX_RANKS, grouping):
            train, gen = grid.train.sizes, grid.sizes
            related = train.tp_size % gen.tp_size == 0 or gen.tp_size % train.tp_size == 0
            ordinary = grouping is Grouping.INTERVAL and related and train.pp_size % gen.pp_size == 0
            if grid.train.order is RankOrder.PAPER and not ordinary:
                for rank in range(train.num_ranks):
                    inside = rank % (gen.pp_size * gen.tp_size)
                    assert grid.coordinate(rank) == Coordinate(
                        replica=rank // (gen.pp_size * gen.tp_size),
                        pp=inside // gen.tp_size,
                        tp=inside % gen.tp_size,
                    )


def test_micro_dp_groups_hold_the_same_generation_shard_in_one_replica() -> None:
    for grouping in Grouping:
        for grid in all_grids(8, grouping):
            group_of = {rank: group for group in grid.micro_dp_groups for rank in group}
            for one, other in combinations(range(grid.train.num_ranks), 2):
                same = grid.train.coordinate(one).dp_rank == grid.train.coordinate(
                    other
                ).dp_rank and generated(grid, one) == generated(grid, other)
                assert (group_of[one] is group_of[other]) == same, grid


def test_engines_that_cannot_share_out_the_ranks_are_refused_with_the_nearest_sizes() -> None:
    with pytest.raises(TopologyError) as caught:
        GenerationGrid(Grid(TrainSizes(2, 2, 2)), GenSizes(1, 3))
    assert str(caught.value) == (
        "an engine's p_g·t_g = 1·3 = 3 ranks do not divide the 8 ranks of training 2-2-2;"
        " choose p_g·t_g from 1, 2, 4, 8"
    )
    for p, t, d in ((1, 1, 1), (2, 2, 2), (3, 1, 3), (1, 3, 4), (5, 2, 1)):
        train = TrainSizes(p, t, d)
        for p_g, t_g in product(range(1, 14), range(1, 14)):
            gen, tiles = GenSizes(p_g, t_g), p * t * d % (p_g * t_g) == 0
            assert (gen.problems_over(train) == []) == tiles


def test_micro_replicas_are_counted_where_sizes_nest_only() -> None:
    assert generation("2-4-8", "1-2", "interval").micro_dp_size == 4
    with pytest.raises(TopologyError) as caught:
        generation("1-2-2", "1-4", "interval").micro_dp_size  # noqa: B018
    assert str(caught.value) == (
        "generation 1-4 does not nest in training 1-2-2, so that d_g is not defined;"
        " choose p_g from the divisors of p and t_g from those of t"
    )
