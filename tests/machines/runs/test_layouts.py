"""The job of `make train` on 2 to 4 hosts, with groups inside hosts and across, computes what it does on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machines.hosts import joined_hosts
from tests.machines.jobs import train, train_here
from tests.machines.ray_nodes import RayCluster, warm_folder

pytestmark = pytest.mark.timeout(1500)

NAMES = ("first", "second", "third", "fourth")
ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.0.4")


@pytest.mark.parametrize(
    ("ranks_per_node", "changes"),
    [
        pytest.param([2, 2], ["actor.generate=2-1"], id="2-hosts-stages-of-engines-across"),
        pytest.param(
            [2, 2],
            ["actor.parallel=1-2-2", "actor.generate=1-1", "critic.parallel=2-2-1"],
            id="2-hosts-tensors-inside",
        ),
        pytest.param([1] * 4, ["actor.generate=1-2"], id="4-hosts-tensors-across"),
        pytest.param([2, 1, 1], ["actor.parallel=2-1-2", "actor.generate=1-1"], id="3-hosts-uneven"),
    ],
)
def test_hosts_give_the_numbers_of_one_machine_bit_by_bit(
    ranks_per_node: list[int], changes: list[str], tmp_path: Path, warm_ray: dict[str, str]
):
    names = NAMES[: len(ranks_per_node)]
    with joined_hosts(names, shared=[tmp_path, warm_folder(warm_ray)]) as network:
        cluster = RayCluster(network.hosts, warm_ray)
        where = f"cluster.ranks_per_node={ranks_per_node}"
        over_hosts = train(tmp_path / "hosts", where, *changes, cluster=cluster)
    on_one = train_here(tmp_path / "one", *changes, warm_ray=warm_ray)
    assert over_hosts.nodes("actor") == set(ADDRESSES[: len(names)])
    assert len(over_hosts.rows) == 2
    assert over_hosts.rows == on_one.rows
    assert over_hosts.weights == on_one.weights


def test_a_critic_on_another_host_gives_the_numbers_of_one_machine_bit_by_bit(
    tmp_path: Path, warm_ray: dict[str, str]
):
    """Rows cross the network."""
    changes = (
        "actor.parallel=2-1-1",
        "actor.generate=1-1",
        "critic.parallel=1-1-2",
        "reference.parallel=1-2-1",
        "cluster.ranks_per_node=[2]",
        "cluster.pools={values: {roles: [critic], ranks_per_node: [2]}}",
    )
    with joined_hosts(NAMES[:2], shared=[tmp_path, warm_folder(warm_ray)]) as network:
        cluster = RayCluster(network.hosts, warm_ray)
        apart = train(tmp_path / "apart", *changes, cluster=cluster)
    on_one = train_here(tmp_path / "one", *changes, warm_ray=warm_ray)
    assert apart.nodes("actor") == apart.nodes("reference") == {ADDRESSES[0]}
    assert apart.nodes("critic") == {ADDRESSES[1]}
    assert apart.rows == on_one.rows
    assert apart.weights == on_one.weights
