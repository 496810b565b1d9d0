"""The pictures of docs/images: they show the right groups and switches, and are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.reshard.boxes import num_elements
from hybridengine.reshard.compiler import inverse_local
from hybridengine.reshard.cost import plan_costs
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid
from hybridengine.topology.sizes import GenSizes, TrainSizes
from scripts import draw_groups


def elements(boxes) -> int:
    return sum(map(num_elements, boxes))


def test_vanilla_grouping_leaves_ranks_1_2_5_6_without_overlap():
    grid = draw_groups.groups_example(Grouping.VANILLA)
    held = {rank: draw_groups.holding(grid, rank) for rank in range(8)}
    assert [rank for rank, one in held.items() if one.kept is None] == [1, 2, 5, 6]
    assert [elements(one.received) for one in held.values()] == [1, 2, 2, 1] * 2
    assert held[1].held_twice == (((0, 1), (1, 2)),)


@pytest.mark.parametrize(
    ("train", "gen"), [("1-4-2", "1-2"), ("2-4-1", "1-2"), ("4-2-1", "2-1"), ("2-2-2", "2-2")]
)
def test_interval_grouping_keeps_every_training_shard(train: str, gen: str):
    sizes = TrainSizes.parse(train)
    grid = GenerationGrid(Grid(sizes), GenSizes.parse(gen))
    for rank in range(sizes.num_ranks):
        held = draw_groups.holding(grid, rank)
        assert held.kept is not None and elements([held.kept]) == 1 and held.held_twice == ()
        assert elements(held.received) == grid.micro_dp_size - 1  # (d_g - 1)/(tp) of M, table 2 of the paper


def test_the_trace_of_a_switch_agrees_with_the_cost_of_its_plan():
    there, element_bytes = draw_groups.example_plan()
    for plan in (there, inverse_local(there)):
        for rank, cost in plan_costs(plan, element_bytes).items():
            trace = draw_groups.storage_trace(plan, rank, element_bytes)
            assert tuple(moment.total_bytes for moment in trace) == cost.memory_bytes
            assert trace[0] == draw_groups.Moment(cost.source_bytes, 0, 0)
            assert trace[-1] == draw_groups.Moment(0, cost.destination_bytes, 0)
    assert all(moment.staging_bytes == 0 for moment in trace), "the way back sends nothing"


def test_pictures_are_of_the_present_groups_and_plans_and_drawn_alike_every_time(tmp_path: Path):
    first, second = draw_groups.write(tmp_path / "first"), draw_groups.write(tmp_path / "second")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        committed = draw_groups.ROOT / "docs" / "images" / one.name
        drawn_from = f"digest {draw_groups.digest(one.stem)}"
        assert drawn_from in one.read_text()
        assert drawn_from in committed.read_text(), f"{committed} is old; run python scripts/draw_groups.py"
