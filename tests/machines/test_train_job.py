"""The job of `make train` on two hosts with two ranks each computes what it computes on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.report import keys
from tests.machines.hosts import joined_hosts
from tests.machines.jobs import train, train_here
from tests.machines.ray_nodes import RayCluster, warm_folder

pytestmark = pytest.mark.timeout(900)


def test_two_hosts_give_the_numbers_of_one_machine_bit_by_bit(tmp_path: Path, warm_ray: dict[str, str]):
    """Stages of the actor are on different hosts: activations, weights of a switch and rows cross the network.

    The hosts' names resolve to nothing here; test_two_hosts.py has hosts whose names resolve to loopback.
    """
    shared = [tmp_path, warm_folder(warm_ray)]
    with joined_hosts(["first", "second"], shared=shared, own_name="unknown") as network:
        cluster = RayCluster(network.hosts, warm_ray)
        over_two = train(tmp_path / "two", "cluster.ranks_per_node=[2,2]", cluster=cluster)
        crossed = network.sent_bytes()
    on_one = train_here(tmp_path / "one", warm_ray=warm_ray)
    assert over_two.nodes("actor") == over_two.nodes("critic") == {"10.77.0.1", "10.77.0.2"}
    assert on_one.nodes("actor") == {"127.0.0.1"}
    assert [row[keys.STEP] for row in over_two.rows] == [0, 1]
    assert over_two.rows == on_one.rows
    assert over_two.weights == on_one.weights
    # Half of the weights, in each direction, at least once.
    assert min(crossed["first", "second"], crossed["second", "first"]) > len(over_two.weights) / 2
