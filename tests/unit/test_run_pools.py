"""Which nodes the pools of a run get, and in which order they are reserved; Ray's answers are written here."""

from __future__ import annotations

from typing import Any

import pytest

from hybridengine.cli.doctor import _needs
from hybridengine.config import load_config
from hybridengine.controller.cluster import NodeOffer
from hybridengine.errors import ConfigError
from hybridengine.training import launch
from hybridengine.training.launch import RunPools

SEVERAL = "cluster.pools.values={roles: [critic, reference], ranks_per_node: [2]}"
SIZES = (
    "actor.parallel=1-1-1",
    "actor.generate=1-1",
    "critic.parallel=1-1-2",
    "reference.parallel=1-1-2",
)


class FakePool:
    """Notes when it is reserved."""

    reserved: list[str]

    def __init__(self, *, name: str, ranks_per_node: tuple[int, ...], **_: Any) -> None:
        self.name, self.ranks_per_node = name, ranks_per_node

    def reserve(self) -> None:
        self.reserved.append(self.name)


def pools_on(
    total: list[int], free: list[int], monkeypatch: pytest.MonkeyPatch, config: Any
) -> tuple[RunPools, list[str]]:
    """Return a run's pools on nodes with so many CPUs, and the list of the names of those that are reserved."""

    def offers(*, free: list[int] = free, **_: Any) -> list[NodeOffer]:
        return [NodeOffer(f"10.0.0.{number}", cpus, 0) for number, cpus in enumerate(free)]

    FakePool.reserved = []
    monkeypatch.setattr(launch, "start_ray", lambda **_: None)
    monkeypatch.setattr(launch, "ResourcePool", FakePool)
    monkeypatch.setattr(
        launch, "node_offers", lambda *, free=False, now=free: offers(free=now if free else total)
    )
    return RunPools(config), FakePool.reserved


@pytest.mark.parametrize(
    ("total", "free", "order"),
    [
        ([1, 2], [1, 2], ["main", "values"]),
        ([2, 1], [2, 1], ["values", "main"]),  # the first node alone has room for two
        ([2, 2], [2, 1], ["values", "main"]),  # another job has one CPU of the second node
        ([2, 2], [1, 2], ["main", "values"]),
        ([2, 1], [0, 0], ["values", "main"]),  # the ranks of an earlier attempt end
    ],
)
def test_pools_are_reserved_in_an_order_that_fits_the_room_that_others_leave(
    total: list[int], free: list[int], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("configs/arithmetic.yaml", ["cluster.ranks_per_node=[1]", SEVERAL, *SIZES])
    pools, reserved = pools_on(total, free, monkeypatch, config)
    pools.reserve()
    assert reserved == order


def test_a_host_that_does_not_answer_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray knows it for a minute; the first pool would take the only node that answers and has room for the second."""
    config = load_config("configs/arithmetic.yaml", ["cluster.ranks_per_node=[1]", SEVERAL, *SIZES])
    pools, reserved = pools_on([2, 2, 1], [2, 2, 1], monkeypatch, config)
    monkeypatch.setattr(launch, "which_answer", lambda offers: [False, True, True])
    for _ in range(2):
        pools.reserve()  # the second time, what they have reserved is not free
    assert reserved == ["values", "main"]
    pools, reserved = pools_on([2, 2, 1], [2, 2, 1], monkeypatch, config)
    monkeypatch.setattr(launch, "which_answer", lambda offers: [True] * 3)
    pools.reserve()
    assert reserved == ["main", "values"]


def test_pools_that_fit_on_no_cluster_of_this_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("configs/arithmetic.yaml", ["cluster.ranks_per_node=[1]", SEVERAL, *SIZES])
    with pytest.raises(
        ConfigError,
        match=r"^no nodes with room are left for pool 'values' .* the run wants 3 ranks, and the cluster has room for 2",
    ):
        pools_on([2], [2], monkeypatch, config)


def test_the_doctor_examines_every_engine_as_a_pool() -> None:
    config = load_config("configs/async-ppo.yaml", ["cluster.pools.engines.ranks_per_node=[2]"])
    needs = _needs(config, None)
    assert needs.started == config.started_pools
    assert [name for name in needs.started if name.startswith("engines.")] == ["engines.0", "engines.1"]
