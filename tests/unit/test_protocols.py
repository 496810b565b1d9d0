"""Protocols, compared with a statement of table 3 in coordinates alone, written without grids or group functions."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest

from hybridengine.errors import ProtocolError
from hybridengine.rows.protocols import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    PROTO_3D,
    PROTO_3D_ALL_MICRO_DP,
    PROTO_3D_PP_ONLY,
    GroupTopology,
    Protocol,
    Registration,
    even_split,
    register,
    registered,
)
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import GenSizes, TrainSizes

PAPER_PROTOCOLS = {
    protocol.name: protocol
    for protocol in (ONE_TO_ALL, PROTO_3D, PROTO_3D_ALL_MICRO_DP, PROTO_3D_PP_ONLY, DP_PROTO, ALL_TO_ALL)
}
"""The six protocols of table 3, with the paper's names."""
NUM_ROWS = (1, 2, 3, 5, 8, 13, 17, 64)
SIZES = [(p, t, d) for p in range(1, 9) for t in range(1, 9) for d in range(1, 9) if p * t * d <= 8]


@dataclass(frozen=True)
class Place:
    pp: int
    tp: int
    dp: int
    gen_pp: int
    gen_tp: int
    replica: int


def places(p: int, t: int, d: int, p_g: int, t_g: int, order: RankOrder) -> dict[int, Place]:
    """Return rank -> place, from facts of the paper: rank = dp·p·t + pp·t + tp, or Megatron's pp·d·t + dp·t + tp.

    Sizes that do not nest: with p_g | p and t | t_g the ranks of a stage group and one tp divide their shard in the
    order of dp and pp; otherwise engines are consecutive.
    """
    found = {}
    for pp in range(p):
        for tp in range(t):
            for dp in range(d):
                paper = order is RankOrder.PAPER
                rank = dp * p * t + pp * t + tp if paper else pp * d * t + dp * t + tp
                if p % p_g == 0 and t % t_g == 0:
                    micro = (pp % (p // p_g)) * (t // t_g) + tp % (t // t_g)
                    replica = dp * ((p // p_g) * (t // t_g)) + micro
                    gen_pp, gen_tp = pp * p_g // p, tp * t_g // t
                elif p % p_g == 0 and t_g % t == 0:
                    replica, part = divmod(dp * (p // p_g) + pp % (p // p_g), t_g // t)
                    gen_pp, gen_tp = pp * p_g // p, tp * (t_g // t) + part
                else:
                    replica, inside = divmod(dp * p * t + pp * t + tp, p_g * t_g)
                    gen_pp, gen_tp = divmod(inside, t_g)
                found[rank] = Place(pp, tp, dp, gen_pp, gen_tp, replica)
    return found


def share(num_rows: int, num_parts: int, part: int) -> list[int]:
    """Return the rows of a part: parts are consecutive, and as large as if rows were dealt one by one."""
    sizes = [0] * num_parts
    for row in range(num_rows):
        sizes[row % num_parts] += 1
    begin = sum(sizes[:part])
    return list(range(begin, begin + sizes[part]))


def small_groups(order: RankOrder) -> Iterator[tuple[GroupTopology, dict[int, Place]]]:
    """Yield every training grid of up to 8 ranks with every generation grid over it."""
    for p, t, d in SIZES:
        grid = Grid(TrainSizes(p, t, d), order)
        for p_g, t_g in product(range(1, 9), range(1, 9)):
            if p * t * d % (p_g * t_g) == 0:
                generation = GenerationGrid(grid, GenSizes(p_g, t_g))
                yield GroupTopology(grid, generation), places(p, t, d, p_g, t_g, order)


def expected_sources(name: str, place: dict[int, Place]) -> list[int]:
    """Return the ranks to collect from, by the axis that rows are split over: the right column of table 3."""
    last_stage = max(at.pp for at in place.values())
    last_gen_stage = max(at.gen_pp for at in place.values())
    chosen = {
        "3D_PROTO": {at.dp: rank for rank, at in place.items() if at.pp == last_stage and at.tp == 0},
        "3D_ALL_MICRO_DP": {
            at.replica: rank for rank, at in place.items() if at.gen_pp == last_gen_stage and at.gen_tp == 0
        },
        "3D_PP_ONLY": {at.pp: rank for rank, at in place.items() if at.tp == 0 and at.dp == 0},
    }.get(name, {rank: rank for rank in place})
    return [chosen[index] for index in sorted(chosen)]


def expected_split(name: str, place: dict[int, Place]) -> tuple[int, dict[int, int]] | None:
    """Return (number of parts, part of each rank), the left column of table 3; None if every rank gets all rows."""
    part_of = {
        "3D_PROTO": {rank: at.dp for rank, at in place.items()},
        "3D_ALL_MICRO_DP": {rank: at.replica for rank, at in place.items()},
        "DP_PROTO": {rank: rank for rank in place},
    }.get(name)
    return None if part_of is None else (len(set(part_of.values())), part_of)


@pytest.mark.parametrize("order", list(RankOrder))
@pytest.mark.parametrize("name", list(PAPER_PROTOCOLS))
def test_sources_are_table_3_on_every_small_grid(name: str, order: RankOrder) -> None:
    for topology, place in small_groups(order):
        got = PAPER_PROTOCOLS[name].source_ranks(topology)
        assert list(got) == expected_sources(name, place), (topology, place)


@pytest.mark.parametrize("order", list(RankOrder))
@pytest.mark.parametrize("name", [name for name in PAPER_PROTOCOLS if name != "ALL_TO_ALL"])
def test_rows_are_split_as_table_3_on_every_small_grid(name: str, order: RankOrder) -> None:
    protocol, checked, refused = PAPER_PROTOCOLS[name], 0, 0
    for (topology, place), num_rows in product(small_groups(order), NUM_ROWS):
        split = expected_split(name, place)
        if split is not None and num_rows < split[0]:
            with pytest.raises(ProtocolError, match=rf"{num_rows} rows cannot be split over {split[0]} "):
                protocol.row_ranges(num_rows, topology)
            refused += 1
            continue
        rows = [list(rows) for rows in protocol.row_ranges(num_rows, topology)]
        if split is None:
            expected = [list(range(num_rows))] * len(place)
        else:
            expected = [share(num_rows, split[0], split[1][rank]) for rank in sorted(place)]
        assert rows == expected, (topology, place)
        checked += 1
    assert checked > 200
    assert (refused > 0) == (name in ("3D_PROTO", "3D_ALL_MICRO_DP", "DP_PROTO"))


def test_all_to_all_gives_every_rank_its_own_item() -> None:
    topology = GroupTopology.parse("2-1-2")
    assert ALL_TO_ALL.row_ranges(4, topology) == (range(1), range(1, 2), range(2, 3), range(3, 4))
    assert ALL_TO_ALL.takes_items
    with pytest.raises(ProtocolError, match="3 items for the 4 ranks"):
        ALL_TO_ALL.row_ranges(3, topology)


def test_names_and_collection_are_the_papers() -> None:
    assert {name: protocol.concatenates for name, protocol in PAPER_PROTOCOLS.items()} == {
        "ONE_TO_ALL": False,
        "3D_PROTO": True,
        "3D_ALL_MICRO_DP": True,
        "3D_PP_ONLY": False,
        "DP_PROTO": True,
        "ALL_TO_ALL": False,
    }
    assert str(PROTO_3D) == PROTO_3D.name == "3D_PROTO"
    assert PAPER_PROTOCOLS["3D_PP_ONLY"] is PROTO_3D_PP_ONLY


def test_micro_dp_without_generation_sizes_is_refused() -> None:
    topology = GroupTopology.parse("2-2-1")
    for use in (
        lambda: PROTO_3D_ALL_MICRO_DP.row_ranges(8, topology),
        lambda: PROTO_3D_ALL_MICRO_DP.source_ranks(topology),
    ):
        with pytest.raises(ProtocolError, match="needs generation sizes, and the group 2-2-1 has none"):
            use()


def test_generation_grid_of_another_group_is_refused() -> None:
    other = Grid(TrainSizes(1, 4, 1))
    with pytest.raises(ProtocolError, match="group's own grid"):
        GroupTopology(Grid(TrainSizes(2, 2, 1)), GenerationGrid(other, GenSizes(1, 1)))


def test_even_split_covers_all_rows_with_sizes_that_differ_by_one() -> None:
    for num_parts in range(1, 9):
        for num_rows in range(num_parts, 40):
            parts = even_split(num_rows, num_parts)
            assert [row for rows in parts for row in rows] == list(range(num_rows))
            sizes = [len(rows) for rows in parts]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("split", "sources", "message"),
    [
        (lambda n, topology: (range(n),), lambda topology: (0,), r"into range\(0, 4\) for 2 ranks"),
        (lambda n, topology: (range(n), range(n + 1)), lambda topology: (0,), r"range\(0, 5\) for 2 ranks"),
        (lambda n, topology: (range(0, n, 2), range(n)), lambda topology: (1,), "step 1"),
        (
            lambda n, topology: (range(n), range(n)),
            lambda topology: (0, 1),
            r"range\(0, 4\), range\(0, 4\) of 4 rows",
        ),
        (lambda n, topology: (range(2), range(2, 3)), lambda topology: (0, 1), r"range\(2, 3\) of 4 rows"),
        (
            lambda n, topology: (range(2), range(2, 4)),
            lambda topology: (1, 0),
            r"range\(2, 4\), range\(0, 2\) of 4 rows",
        ),
        (lambda n, topology: (range(n), range(n)), lambda topology: (0, 2), r"from ranks \(0, 2\)"),
        (lambda n, topology: (range(n), range(n)), lambda topology: (), r"from ranks \(\)"),
        (lambda n, topology: (range(n), range(n)), lambda topology: (0, 0), r"from ranks \(0, 0\)"),
    ],
)
def test_inconsistent_protocols_of_users_are_refused(split, sources, message: str) -> None:
    protocol = Protocol("MINE", split, sources, concatenates=True)
    with pytest.raises(ProtocolError, match=message):
        protocol.row_ranges(4, GroupTopology.parse("1-1-2"))


def test_a_users_protocol_works() -> None:
    backwards = Protocol(
        "BACKWARDS",
        lambda n, topology: tuple(reversed(even_split(n, topology.num_ranks))),
        lambda topology: tuple(reversed(range(topology.num_ranks))),
        concatenates=True,
    )
    assert backwards.row_ranges(5, GroupTopology.parse("1-1-2")) == (range(3, 5), range(3))


class Base:
    @register(ONE_TO_ALL)
    def load(self) -> None: ...

    @register(PROTO_3D)
    def update(self) -> None: ...

    def private(self) -> None: ...


class Derived(Base):
    @register(DP_PROTO, ["tokens", "scores"])
    def update(self) -> None: ...

    @register(PROTO_3D_ALL_MICRO_DP, returns_rows=True)
    def generate(self) -> None: ...


def test_registered_methods_are_found_along_the_bases_and_nothing_else() -> None:
    assert registered(Base) == {
        "load": (Base.load, Registration(ONE_TO_ALL)),
        "update": (Base.update, Registration(PROTO_3D)),
    }
    assert registered(Derived) == {
        "load": (Base.load, Registration(ONE_TO_ALL)),
        "update": (Derived.update, Registration(DP_PROTO, ("tokens", "scores"))),
        "generate": (Derived.generate, Registration(PROTO_3D_ALL_MICRO_DP, returns_rows=True)),
    }


def test_an_unregistered_override_is_refused() -> None:
    class Forgetful(Base):
        def update(self) -> None: ...

    with pytest.raises(ProtocolError, match=r"Forgetful\.update overrides a method registered with 3D_PROTO"):
        registered(Forgetful)


def test_misuse_of_register_is_refused() -> None:
    def method(self) -> None: ...

    with pytest.raises(ProtocolError, match="names no protocol"):
        register(method)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProtocolError, match="not a plain method"):
        register(ONE_TO_ALL)(staticmethod(method))
    with pytest.raises(ProtocolError, match="ONE_TO_ALL does not put rows together"):
        register(ONE_TO_ALL, returns_rows=True)


def test_protocols_and_topologies_cross_processes() -> None:
    topology = GroupTopology.parse("2-2-1", "1-1", RankOrder.MEGATRON)
    assert pickle.loads(pickle.dumps(topology)) == topology
    for protocol in PAPER_PROTOCOLS.values():
        assert pickle.loads(pickle.dumps(protocol)) == protocol
