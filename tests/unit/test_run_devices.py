"""Budgets of a run against the devices of its ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridengine.machine import Device
from hybridengine.planning.budget import Budget
from hybridengine.training.devices import Placed, device_problems

GB = 10**9
MAIN = Budget(
    "main",
    {"load": 30 * GB, "training step": 50 * GB, "save": 20 * GB},
    HOST := GB,
    0,
    {"training step": "set actor.recompute=full, lower actor.micro_batch_tokens=8192, take more ranks"},
)
SMALL = Budget(
    "critic", {"load": 10 * GB, "training step": 15 * GB}, HOST, 0, {"training step": "take more ranks"}
)


def gpus(*sizes: int) -> list[Placed]:
    return [
        Placed(f"10.0.0.{place}", Device(size * GB, is_gpu=True, node_bytes=8 * GB))
        for place, size in enumerate(sizes)
    ]


def hosts(size: int, *nodes: str) -> list[Placed]:
    return [Placed(node, Device(size * GB, is_gpu=False, node_bytes=size * GB)) for node in nodes]


def test_every_rank_has_a_gpu_of_its_own() -> None:
    assert not list(device_problems({"main": MAIN}, {"main": gpus(50, 80, 80)}))
    assert not list(device_problems({"main": MAIN, "critic": SMALL}, {"main": gpus(50), "critic": gpus(15)}))


def test_the_smallest_device_counts() -> None:
    """A part of a GPU (MIG) among whole ones: the largest phase, the missing bytes and the remedies are named."""
    (problem,) = device_problems({"main": MAIN}, {"main": gpus(80, 20, 80)})
    for part in (
        "phase 'training step' of pool main needs",
        "a GPU of node 10.0.0.1 has",
        "30.0 GB are missing",
        "; set actor.recompute=full, lower actor.micro_batch_tokens=8192, take more ranks",
    ):
        assert part in problem


def test_each_pool_that_does_not_fit_is_named() -> None:
    ranks = {"main": gpus(40, 80), "critic": gpus(14)}
    one, other = device_problems({"main": MAIN, "critic": SMALL}, ranks)
    assert "pool main" in one and "10.0 GB are missing" in one
    assert "pool critic" in other and "1.0 GB are missing" in other


@pytest.mark.parametrize(("size", "missing"), [(101, None), (100, "0.5 GB"), (40, "30.5 GB")])
def test_ranks_share_the_memory_of_a_node(size: int, missing: str | None) -> None:
    """Two ranks of 50 GB on one node, one on another: two share the memory, beside 0.47 GB of each one's process."""
    found = list(device_problems({"main": MAIN}, {"main": hosts(size, "a", "b", "a")}))
    assert [
        f"{missing} are missing" in one and "each of its 2 ranks on node a has" in one for one in found
    ] == ([True] if missing else [])


@pytest.mark.parametrize(("size", "pools"), [(61, []), (60, ["main"]), (35, ["main", "critic"])])
def test_pools_share_the_memory_of_a_node_at_different_times(size: int, pools: list[str]) -> None:
    """While one is in its largest phase, the other may be in its smallest: 50 beside 10, and 15 beside 20."""
    ranks = {"main": hosts(size, "a"), "critic": hosts(size, "a")}
    found = list(device_problems({"main": MAIN, "critic": SMALL}, ranks))
    assert [one.split(" of pool ")[1].split()[0] for one in found] == pools
    apart = {"main": hosts(size, "a"), "critic": hosts(size, "b")}
    assert len(list(device_problems({"main": MAIN, "critic": SMALL}, apart))) == (size < 50)


def test_offloaded_state_takes_memory_of_a_node_without_gpus() -> None:
    offloaded = replace(MAIN, offloaded_bytes=20 * GB)
    assert not list(device_problems({"main": offloaded}, {"main": hosts(71, "a")}))
    (problem,) = device_problems({"main": offloaded}, {"main": hosts(60, "a")})
    assert "10.5 GB are missing" in problem


def test_host_memory_beside_gpus() -> None:
    """Two ranks of one pool and one of another on a node: 3, 3 and 1 GB."""
    one_node = [Placed("a", Device(80 * GB, is_gpu=True, node_bytes=7 * GB))]
    budgets = {"main": replace(MAIN, host_bytes=3 * GB), "critic": SMALL}
    assert not list(device_problems(budgets, {"main": one_node * 2, "critic": one_node}))
    (problem,) = device_problems(budgets, {"main": one_node * 2, "critic": one_node * 3})
    assert "ranks on node a need" in problem and "2.0 GB are missing; set offload=none" in problem
