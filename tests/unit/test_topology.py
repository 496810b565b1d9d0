"""Grids and groups: the worked examples of the paper, Megatron's own rank generator, and exhaustive small grids."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations, product

import pytest

from hybridengine.errors import TopologyError
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Coordinate, Grid, Groups, RankOrder, group_with
from hybridengine.topology.sizes import GenSizes, TrainSizes, divisors

MAX_RANKS = 8


def sizes_up_to(num_ranks: int) -> list[tuple[int, int, int]]:
    """Return all (p, t, d) with p·t·d <= num_ranks."""
    counts = range(1, num_ranks + 1)
    return [(p, t, d) for p in counts for t in counts for d in counts if p * t * d <= num_ranks]


def nested_grids(num_ranks: int, grouping: Grouping) -> Iterator[GenerationGrid]:
    """Yield every generation grid inside every training grid, in both rank orders."""
    for order in RankOrder:
        for p, t, d in sizes_up_to(num_ranks):
            for p_g in (n for n in range(1, p + 1) if p % n == 0):
                for t_g in (n for n in range(1, t + 1) if t % n == 0):
                    yield GenerationGrid(Grid(TrainSizes(p, t, d), order), GenSizes(p_g, t_g), grouping)


def generation(train: str, gen: str, grouping: str, order: RankOrder = RankOrder.PAPER) -> GenerationGrid:
    return GenerationGrid(Grid(TrainSizes.parse(train), order), GenSizes.parse(gen), Grouping(grouping))


def partitions(groups: Groups, num_ranks: int, group_size: int) -> bool:
    """Return True if every rank is in one group, and groups have `group_size` ascending ranks, ordered by first rank."""
    ordered = all(list(group) == sorted(group) for group in groups) and list(groups) == sorted(groups)
    sized = all(len(group) == group_size for group in groups)
    return ordered and sized and sorted(chain(*groups)) == list(range(num_ranks))


# The table of worked examples: training, generation, grouping, generation TP groups, micro-DP groups.
WORKED = [
    ("1-4-2", "1-2", "vanilla", [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ("1-4-2", "1-2", "interval", [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("2-4-1", "1-2", "interval", [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("4-2-1", "2-1", "interval", [[n] for n in range(8)], [[0, 1, 2, 3], [4, 5, 6, 7]]),
]


@pytest.mark.parametrize(("train", "gen", "grouping", "tp_groups", "micro_dp_groups"), WORKED)
def test_worked_examples(
    train: str, gen: str, grouping: str, tp_groups: list[list[int]], micro_dp_groups: list[list[int]]
) -> None:
    grid = generation(train, gen, grouping)
    assert [list(group) for group in grid.groups("tp")] == tp_groups
    assert [list(group) for group in grid.micro_dp_groups] == micro_dp_groups


def test_worked_example_of_generation_pipelines() -> None:
    grid = generation("4-2-1", "2-1", "interval")
    assert grid.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.groups("tp", "pp") == grid.groups("pp")


def shard_ends(index: int, count: int) -> tuple[int, int]:
    """Return interval `index` of `count`, in units that every degree up to 16 divides (720720 = lcm(1..16))."""
    return index * 720720 // count, (index + 1) * 720720 // count


def overlap(grid: GenerationGrid, rank: int) -> tuple[bool, bool]:
    """Return (the training shard is inside the generation shard, the two share elements), over both axes."""
    train, gen, sizes = grid.train.coordinate(rank), grid.coordinate(rank), grid.train.sizes
    inside, shared = True, True
    for (a, b), (c, d) in (
        (shard_ends(train.pp_rank, sizes.pp_size), shard_ends(gen.pp_rank, grid.sizes.pp_size)),
        (shard_ends(train.tp_rank, sizes.tp_size), shard_ends(gen.tp_rank, grid.sizes.tp_size)),
    ):
        inside &= c <= a and b <= d
        shared &= max(a, c) < min(b, d)
    return inside, shared


def test_vanilla_grouping_leaves_ranks_without_overlap() -> None:
    grid = generation("1-4-2", "1-2", "vanilla")
    assert [rank for rank in range(8) if not overlap(grid, rank)[1]] == [1, 2, 5, 6]


def test_interval_grouping_puts_every_training_shard_inside_the_generation_shard() -> None:
    grids = list(nested_grids(MAX_RANKS, Grouping.INTERVAL))
    assert len(grids) > 150
    for grid in grids:
        for rank in range(grid.train.num_ranks):
            assert overlap(grid, rank) == (True, True), (grid, rank)


def test_interval_coordinates_follow_the_formula_of_the_paper() -> None:
    for grid in nested_grids(MAX_RANKS, Grouping.INTERVAL):
        p, t = grid.train.sizes.pp_size, grid.train.sizes.tp_size
        p_g, t_g = grid.sizes.pp_size, grid.sizes.tp_size
        for rank in range(grid.train.num_ranks):
            train, gen = grid.train.coordinate(rank), grid.coordinate(rank)
            assert gen.tp_rank == int(train.tp_rank * t_g / t)
            assert gen.pp_rank == int(train.pp_rank * p_g / p)
            dp_rank, micro = divmod(gen.replica_rank, p * t // (p_g * t_g))
            assert dp_rank == train.dp_rank
            assert divmod(micro, t // t_g) == (train.pp_rank % (p // p_g), train.tp_rank % (t // t_g))


def test_vanilla_engines_are_consecutive_ranks_of_a_replica_in_the_papers_order() -> None:
    for grid in nested_grids(MAX_RANKS, Grouping.VANILLA):
        if grid.train.order is RankOrder.PAPER:
            size, total = grid.sizes.num_ranks, grid.train.num_ranks
            assert grid.groups("tp", "pp") == tuple(tuple(range(n, n + size)) for n in range(0, total, size))


@pytest.mark.parametrize("grouping", list(Grouping))
def test_generation_groups_partition_the_ranks(grouping: Grouping) -> None:
    for grid in nested_grids(MAX_RANKS, grouping):
        total, p_g, t_g = grid.train.num_ranks, grid.sizes.pp_size, grid.sizes.tp_size
        d_g = grid.micro_dp_size
        assert d_g * p_g * t_g == grid.train.sizes.model_parallel_size
        assert partitions(grid.groups("tp"), total, t_g)
        assert partitions(grid.groups("pp"), total, p_g)
        assert partitions(grid.groups("tp", "pp"), total, p_g * t_g)
        assert partitions(grid.micro_dp_groups, total, d_g)
        assert len(grid.groups("tp", "pp")) == grid.num_replicas == d_g * grid.train.sizes.dp_size
        replicas = grid.train.groups("pp", "tp")
        for group in grid.micro_dp_groups:  # the domain of a weight gather lies inside one training replica
            assert sum(set(group) <= set(replica) for replica in replicas) == 1


def test_rank_order_decides_whether_gathers_cross_nodes() -> None:
    """2-4-2 -> 1-2 on two nodes of 8 ranks."""
    crossing = {}
    for order in RankOrder:
        groups = generation("2-4-2", "1-2", "interval", order).micro_dp_groups
        crossing[order] = (sum(len({rank // 8 for rank in group}) > 1 for group in groups), len(groups))
    assert crossing == {RankOrder.PAPER: (0, 4), RankOrder.MEGATRON: (4, 4)}


@dataclass(frozen=True, order=True)
class ExpertSizes(TrainSizes):
    """Sizes that divide the same ranks differently for experts; tp and dp are those of the experts."""

    ep_size: int = 1


@dataclass(frozen=True, order=True)
class UnknownSizes(TrainSizes):
    """Sizes with a further axis that no rank order names."""

    zz_size: int = 1


def test_an_axis_that_the_rank_order_does_not_name_is_refused() -> None:
    with pytest.raises(TopologyError, match="has no place for the axes zz; name them"):
        Grid(UnknownSizes(1, 2, 1))


@pytest.mark.parametrize(("sizes", "axis"), [(TrainSizes, "cp"), (ExpertSizes, "ep")])
@pytest.mark.parametrize("order", list(RankOrder))
def test_groups_of_any_axes_equal_those_of_megatrons_rank_generator(
    order: RankOrder, sizes: type[TrainSizes], axis: str
) -> None:
    rank_generator = importlib.import_module("megatron.core.parallel_state").RankGenerator
    axes = ("tp", "dp", "pp", axis)
    tokens = [names for count in range(1, 5) for names in combinations(axes, count)]
    for (p, t, d), further in product(sizes_up_to(MAX_RANKS), range(1, MAX_RANKS + 1)):
        if p * t * d * further <= MAX_RANKS:
            others = {"cp": 1, "ep": 1, axis: further}
            theirs = rank_generator(tp=t, dp=d, pp=p, **others, order=order.value)
            grid = Grid(sizes(p, t, d, **{f"{axis}_size": further}), order)
            for names in tokens:
                expected = sorted(sorted(group) for group in theirs.get_ranks("-".join(names)))
                assert [list(group) for group in grid.groups(*names)] == expected, (grid, names)


def test_experts_cut_the_ranks_of_a_stage_anew() -> None:
    """The position in a stage is tp + t·(cp + c·dp); etp, ep and the rest are its digits, fastest first."""
    count = 0
    for (p, t, d), c in product(sizes_up_to(MAX_RANKS), range(1, 5)):
        stage = t * c * d
        dense = Grid(TrainSizes(p, t, d, c), RankOrder.MEGATRON)
        for etp, e in product(divisors(stage), repeat=2) if p * stage <= MAX_RANKS else ():
            if stage % (etp * e) == 0:
                experts = Grid(ExpertSizes(p, etp, stage // (etp * e), ep_size=e), RankOrder.MEGATRON)
                assert experts.groups("pp") == dense.groups("pp")
                for place, own in zip(dense.coordinates(), experts.coordinates(), strict=True):
                    cp_rank = place["cp"] if c > 1 else 0
                    position = place["tp"] + t * (cp_rank + c * place["dp"])
                    expected = (position % etp, position // etp % e, position // (etp * e))
                    assert own.along(("tp", "ep", "dp")) == expected
                count += 1
    assert count > 300


def test_a_further_axis_is_in_sizes_and_messages() -> None:
    sizes = TrainSizes.parse("2-2-1")
    assert (sizes, str(sizes)) == (TrainSizes(2, 2, 1, 1), "2-2-1")
    for text in ("2-2-1 c=2 v=3", "2-2-1 v=3  c=2"):
        assert TrainSizes.parse(text) == TrainSizes(2, 2, 1, cp_size=2, virtual_stages=3)
        assert str(TrainSizes.parse(text)) == "2-2-1 c=2 v=3"
    wide = TrainSizes(2, 2, 1, cp_size=2)
    assert (str(wide), wide.num_ranks, wide.model_parallel_size) == ("2-2-1 c=2", 8, 4)
    grid = Grid(wide)
    assert [str(grid.coordinate(rank)) for rank in (2, 4)] == ["pp=0 dp=0 cp=1 tp=0", "pp=1 dp=0 cp=0 tp=0"]
    with pytest.raises(TopologyError, match=r"^rank 8 is outside of 2-2-1 c=2, which has ranks 0 to 7$"):
        grid.coordinate(8)
    with pytest.raises(TopologyError, match=r"^axis 'ep' does not exist; axes are pp, dp, cp and tp$"):
        grid.groups("ep")
    with pytest.raises(TopologyError, match=r"^c=0 must be a positive integer; choose at least 1$"):
        TrainSizes(1, 1, 1, 0)
    with pytest.raises(TopologyError, match=r"^p·t·d·c = 2097152 ranks must be at most 1048576"):
        TrainSizes(1, 1, 2**20, 2)
    with pytest.raises(
        TopologyError, match=r"^v=2 virtual stages need pipeline stages, and p=1; choose p of at least 2"
    ):
        TrainSizes.parse("1-2-1 v=2")
    with pytest.raises(TopologyError, match=r"^v=0 must be a positive integer"):
        TrainSizes.parse("2-2-1 v=0")
    assert Grid(TrainSizes(2, 2, 1, virtual_stages=4)).axes == {"tp": 2, "pp": 2, "dp": 1}
    engines = GenerationGrid(grid, GenSizes(1, 1))  # each engine repeats the ranks of one (dp, cp) replica
    assert engines.micro_dp_groups == grid.groups("pp", "tp") == ((0, 1, 4, 5), (2, 3, 6, 7))


@pytest.mark.parametrize("order", list(RankOrder))
def test_ranks_and_coordinates_are_inverse(order: RankOrder) -> None:
    for p, t, d in sizes_up_to(MAX_RANKS):
        grid = Grid(TrainSizes(p, t, d), order)
        places = list(grid.coordinates())
        assert len(set(places)) == grid.num_ranks == p * t * d
        for rank, place in enumerate(places):
            pp, dp, tp = place.pp_rank, place.dp_rank, place.tp_rank
            formula = dp * p * t + pp * t + tp if order is RankOrder.PAPER else pp * t * d + dp * t + tp
            assert rank == formula
            assert grid.coordinate(rank) == place


def test_group_with_is_the_group_that_holds_the_rank() -> None:
    grid = Grid(TrainSizes(2, 2, 2))
    assert group_with(5, grid.groups("tp")) == (4, 5)
    assert group_with(5, grid.groups("dp")) == (1, 5)
    assert group_with(5, grid.groups("pp")) == (5, 7)
    assert group_with(5, grid.groups("pp", "tp")) == (4, 5, 6, 7)
    assert group_with(5, grid.groups("pp", "dp", "tp")) == tuple(range(8))
    assert grid.groups() == tuple((rank,) for rank in range(8))


def test_sizes_are_written_as_in_the_paper() -> None:
    assert TrainSizes.parse("2-4-8") == TrainSizes(pp_size=2, tp_size=4, dp_size=8)
    assert GenSizes.parse("2-4") == GenSizes(pp_size=2, tp_size=4)
    assert (str(TrainSizes(2, 4, 8)), str(GenSizes(1, 12))) == ("2-4-8", "1-12")
    assert (TrainSizes(2, 4, 8).num_ranks, TrainSizes(2, 4, 8).model_parallel_size) == (64, 8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2-2",
        "2-2-1-1",
        "2-2-",
        "-2-2-1",
        "a-2-1",
        "2 2 1",
        "2-2-1.0",
        "2--1",
        "2-2-1 x=2",
        "2-2-1 c=2 c=2",
        "2-2-1 c",
    ],
)
def test_malformed_training_sizes_name_the_form(text: str) -> None:
    with pytest.raises(TopologyError) as caught:
        TrainSizes.parse(text)
    assert (
        str(caught.value)
        == f'{text!r} is not a parallel size; write p-t-d such as "2-2-1" or "2-2-1 c=2 v=2 e=2 etp=2"'
    )


@pytest.mark.parametrize("text", ["2", "2-2-1", "2-x"])
def test_malformed_generation_sizes_name_the_form(text: str) -> None:
    with pytest.raises(TopologyError, match='is not a parallel size; write p_g-t_g such as "1-2"'):
        GenSizes.parse(text)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(TopologyError, match=r"^tp_size=0 must be a positive integer; choose at least 1"):
        TrainSizes.parse("1-0-1")
    with pytest.raises(TopologyError, match=r"^pp_size=-1 must be a positive integer; choose at least 1"):
        GenSizes(-1, 2)
    with pytest.raises(TopologyError, match=r"^dp_size=1\.5 must be a positive integer; choose at least 1"):
        TrainSizes(1, 1, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match=r"^tp_size=True must be a positive integer; choose at least 1"):
        GenSizes(1, True)


def test_ranks_and_coordinates_outside_of_the_grid() -> None:
    grid = Grid(TrainSizes(2, 2, 1))
    for rank in (-1, 4):
        with pytest.raises(
            TopologyError, match=f"^rank {rank} is outside of 2-2-1, which has ranks 0 to 3$"
        ) as caught:
            grid.coordinate(rank)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(TopologyError, match=r"^axis 'ep' does not exist; axes are pp, dp and tp$"):
        grid.groups("tp", "ep")
    with pytest.raises(
        TopologyError, match=r"^rank 4 is outside of generation 1-1 over training 2-2-1, which has"
    ):
        GenerationGrid(grid, GenSizes(1, 1)).coordinate(4)
    with pytest.raises(
        TopologyError, match=r"^rank 4 is in none of the 2 groups; choose a rank of one of them$"
    ):
        group_with(4, grid.groups("tp"))


def test_coordinates_print_their_axes_in_one_order() -> None:
    for order in RankOrder:
        assert [str(place) for place in Grid(TrainSizes(2, 1, 2), order).coordinates()][1:3] == (
            ["pp=1 dp=0 tp=0", "pp=0 dp=1 tp=0"]
            if order is RankOrder.PAPER
            else ["pp=0 dp=1 tp=0", "pp=1 dp=0 tp=0"]
        )
    assert str(generation("1-4-1", "1-2", "interval").coordinate(3)) == "replica=1 pp=0 tp=1"


def test_a_pickled_grid_does_not_grow_with_its_ranks() -> None:
    """It is sent to every rank, with what the controller has derived from it."""
    lengths = set()
    for sizes in ("2-2-2", "8-8-99"):
        grid = Grid(TrainSizes.parse(sizes))
        assert grid.coordinate(3) is not None
        again = pickle.loads(pickle.dumps(grid))
        assert again == grid
        assert again.coordinate(7) == grid.coordinate(7)
        lengths.add(len(pickle.dumps(grid)))
    assert max(lengths) - min(lengths) <= 4


def test_coordinates_are_values_that_travel_between_processes() -> None:
    place = Grid(TrainSizes(2, 2, 2)).coordinate(5)
    assert (place.pp_rank, place["dp"], place.along(("tp", "pp"))) == (0, 1, (1, 0))
    assert pickle.loads(pickle.dumps(place)) == place != Coordinate(pp=0, dp=1, tp=0)
    assert hash(place) == hash(Coordinate(tp=1, dp=1, pp=0))
    with pytest.raises(AttributeError, match=r"^a coordinate has no ep_rank$"):
        place.ep_rank  # noqa: B018
    with pytest.raises(AttributeError, match=r"^a coordinate has no tp_ranks$"):
        place.tp_ranks  # noqa: B018
    with pytest.raises(TopologyError, match="axis 'zz' does not exist; axes are "):
        Grid(TrainSizes(2, 2, 2)).line("zz")


def test_passes_of_a_block_are_the_fewest_that_megatron_accepts() -> None:
    """Of M micro-batches, at least p and at most M, and a rest of none or at least p."""
    for p in range(2, 9):
        for count in range(p, 40):
            accepted = [size for size in range(p, count + 1) if count % size == 0 or count % size >= p]
            assert TrainSizes(p, 1, 1).passes_per_block(count) == min(accepted)


def test_divisors_against_trial_division() -> None:
    for number in range(1, 500):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1-1-1048577", "p·t·d = 1048577 ranks must be at most 1048576; choose smaller sizes"),
        ("1-1-" + "9" * 5000, r"^'1-1-9{53}\.\.\.' is beyond 1048576 ranks; choose smaller sizes$"),
        ("x" * 5000, r"^'x{57}\.\.\.' is not a parallel size; write p-t-d"),
        ("１-４-２", "is not a parallel size; write p-t-d"),
    ],
)
def test_sizes_that_no_cluster_has_are_refused(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        TrainSizes.parse(text)
    with pytest.raises(TopologyError, match="p_g·t_g = 1048577 ranks must be at most 1048576"):
        GenSizes(1, 1048577)
    assert TrainSizes(1, 1, 1048576).num_ranks == 1048576
