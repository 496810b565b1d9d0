"""Nodes that a launch asks for, counted by trying all placements."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.config import load_config
from hybridengine.errors import ConfigError
from hybridengine.launch.shape import (
    Shape,
    launched_config,
    ranks_on_nodes,
    rooms_of,
    shape_of,
    train_arguments,
)
from hybridengine.topology.nodes import choose_nodes, order_pools, rooms_left


@pytest.mark.parametrize(
    ("config", "gpus_per_node", "expected"),
    [
        ("llama3-70b-16nodes", None, Shape((8,) * 16, 8, (8,) * 16)),
        ("qwen3-235b", None, Shape((8,) * 32, 8, (8,) * 32)),
        ("async-70b", None, Shape((8,) * 16, 8, (8,) * 16)),  # 12 nodes of the actor, and 4 of engines
        ("qwen2.5-7b-8gpu", None, Shape((8,), 8, (8,))),
        ("arithmetic", None, Shape((4,), 0, (4,))),  # device: auto
        ("arithmetic", 8, Shape((4,), 8, (4,))),
        ("async-grpo", None, Shape((2, 2), 0, (2, 2))),
        ("async-grpo", 4, Shape((4,), 4, (4,))),  # both pools share a node
    ],
)
def test_a_configuration_says_how_many_nodes_it_needs(
    config: str, gpus_per_node: int | None, expected: Shape
):
    assert shape_of(load_config(f"configs/{config}.yaml", dry_run=True), gpus_per_node) == expected


def test_nodes_with_fewer_ranks_come_last():
    shape = shape_of(load_config("configs/arithmetic.yaml", ["cluster.ranks_per_node=[1,2,1]"]))
    assert shape == Shape((2, 1, 1), 0, (2, 1, 1))
    assert str(shape) == "3 node(s) with 2, 1, 1 ranks, no GPUs"


pools = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=2)


@given(pools, st.integers(3, 5))
def test_the_nodes_are_as_few_as_any_placement_has(sizes: list[list[int]], room: int):
    found = ranks_on_nodes(sizes, room)
    assert sum(found) == sum(map(sum, sizes)) and max(found) <= room
    assert list(found) == sorted(found, reverse=True)
    assert len(found) >= fewest_nodes(sizes, room)
    if len(sizes) == 1:
        assert list(found) == sorted(sizes[0], reverse=True)


THREE_POOLS = [
    "cluster.pools.engines.ranks_per_node=[1,1]",
    "cluster.pools.values={roles: [critic], ranks_per_node: [1,1]}",
    "critic.parallel=1-1-2",
]


@pytest.mark.parametrize(
    ("overrides", "gpus_per_node", "num_nodes"),
    [
        (THREE_POOLS, None, 3),
        ([*THREE_POOLS, "cluster.ranks_per_node=[1,1]"], None, 6),
        (["cluster.pools.engines.ranks_per_node=[1,1,1,1]"], 4, 2),
    ],
)
def test_the_pools_of_engines_find_room_on_the_nodes_that_are_asked_for(
    overrides: list[str], gpus_per_node: int | None, num_nodes: int
):
    """Every engine is a pool of its own, so that several may share a node."""
    config = load_config("configs/async-ppo.yaml", overrides)
    shape, started = shape_of(config, gpus_per_node), list(config.started_pools.values())
    assert shape.num_nodes == num_nodes
    assert [sum(map(sum, started)), len(started)] == [
        config.num_ranks,
        len(config.pools) - 1 + len(config.engines),
    ]
    for rooms in permutations(shape.rooms):
        assert rooms_left(started, rooms, order_pools(started, rooms)) is not None


@given(pools, st.integers(3, 5))
def test_pools_fit_in_whatever_order_the_nodes_come(sizes: list[list[int]], room: int):
    ranks = ranks_on_nodes(sizes, room)
    for rooms in {*permutations(rooms_of(sizes, ranks))}:
        assert rooms_left(sizes, rooms, order_pools(sizes, rooms)) is not None
    assert rooms_of(sizes, ranks) == ranks or len(sizes) > 1


def test_nodes_are_looked_at_once_for_each_number_of_ranks():
    """16,384 ranks: with a look at all nodes for each one, 2,048 nodes take half a minute."""

    class Counted(list[int]):
        looks = 0

        def __iter__(self) -> Iterator[int]:
            for one in super().__iter__():
                self.looks += 1
                yield one

    rooms = Counted([8] * 2048)
    assert choose_nodes([8] * 1024 + [4] * 1024, rooms) == list(range(2048))
    assert rooms.looks <= 2 * 2048


def fewest_nodes(sizes: list[list[int]], room: int) -> int:
    """Return the fewest nodes for which some choice of distinct nodes for each pool fits."""
    for num_nodes in range(1, 99):
        choices = [list(permutations(range(num_nodes), len(ranks))) for ranks in sizes]
        for chosen in product(*choices):
            used = [0] * num_nodes
            for nodes, ranks in zip(chosen, sizes, strict=True):
                for node, number in zip(nodes, ranks, strict=True):
                    used[node] += number
            if max(used) <= room:
                return num_nodes
    raise AssertionError


def test_nodes_that_are_too_small_are_refused():
    config = load_config("configs/llama3-70b-16nodes.yaml", dry_run=True)
    with pytest.raises(
        ConfigError, match="pool 'main' has 8 ranks on a node, and --gpus-per-node 4 allows 4"
    ):
        shape_of(config, 4)
    config = load_config("configs/arithmetic.yaml", ["cluster.device=cpu"])
    with pytest.raises(ConfigError, match="--gpus-per-node 8 does not go with"):
        shape_of(config, 8)
    with pytest.raises(ConfigError, match="--cpus-per-node 3 is too small for 4 ranks on a node"):
        shape_of(config, None, 3)
    assert shape_of(config, None, 4).most_ranks == 4


def test_the_command_of_a_run_resumes_and_joins_the_cluster():
    path, given = "configs/arithmetic.yaml", ["resume=auto", "run.steps=2"]
    arguments = train_arguments(path, given, "10.0.0.1:6379")
    assert arguments == ["train", path, "run.steps=2", "resume=auto", "cluster.address=10.0.0.1:6379"]
    assert launched_config(path, given).run.steps == 2
    *_, override = train_arguments(path, given, "[fd77::1]:6379")
    assert load_config(path, [override]).cluster.address == "[fd77::1]:6379"


@pytest.mark.parametrize(
    "override", ["resume=never", "resume=runs/other/checkpoints/step-00000001", "cluster.address=auto"]
)
def test_what_a_launch_sets_is_refused(override: str):
    with pytest.raises(ConfigError, match="leave it out"):
        launched_config("configs/arithmetic.yaml", [override])
