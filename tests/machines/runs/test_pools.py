"""Engines on another host than the trainer, and runs that go on on other hosts than they have begun on."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.config.run_config import CALLS_FILE
from hybridengine.report import keys
from tests.full.tiny_runs import value
from tests.machines.hosts import joined_hosts
from tests.machines.jobs import train, train_here
from tests.machines.ray_nodes import RayCluster, warm_folder

pytestmark = pytest.mark.timeout(1500)


def test_asynchronous_pools_give_the_weights_of_one_machine_in_the_same_order_of_calls(
    tmp_path: Path, warm_ray: dict[str, str]
):
    """Weights are pushed over the network while engines draw; which responses end first is the machine's."""
    changes = ("run.steps=3", "rollout.max_num_seqs=16")
    with joined_hosts(["trainer", "engines"], shared=[tmp_path, warm_folder(warm_ray)]) as network:
        cluster = RayCluster(network.hosts, warm_ray)
        apart = train(tmp_path / "apart", *changes, cluster=cluster, name="async-ppo")
        crossed = network.sent_bytes()
    replay = f"generation.replay={apart.folder / CALLS_FILE}"
    on_one = train_here(tmp_path / "one", *changes, replay, warm_ray=warm_ray, name="async-ppo")
    assert apart.nodes("actor") == apart.nodes("critic") == {"10.77.0.1"}
    assert apart.nodes("generation") == {"10.77.0.2"}
    assert [row[keys.STEP] for row in apart.rows] == [0, 1, 2, 3]
    assert value(apart.rows[3], "staleness/age_mean") > 0
    assert apart.weights == on_one.weights
    # Weights of the warm-up and of three steps; both engines receive each.
    assert crossed["trainer", "engines"] > 4 * len(apart.weights)


def test_a_run_goes_on_on_other_hosts_from_the_shared_folder(tmp_path: Path, warm_ray: dict[str, str]):
    names, every = ["first", "second", "third", "fourth"], "checkpoint.every=1"
    with joined_hosts(names, shared=[tmp_path, warm_folder(warm_ray)]) as network:
        cluster = RayCluster(network.hosts[:2], warm_ray)
        train(tmp_path / "hosts", "cluster.ranks_per_node=[2,2]", every, cluster=cluster)
    with joined_hosts(names[1:], shared=[tmp_path, warm_folder(warm_ray)]) as network:
        cluster = RayCluster(network.hosts, warm_ray)
        where = "cluster.ranks_per_node=[1,2,1]"
        resumed = train(tmp_path / "hosts", where, every, "run.steps=2", "resume=auto", cluster=cluster)
    on_one = train_here(tmp_path / "one", every, "run.steps=2", warm_ray=warm_ray)
    assert "resuming after step 1" in resumed.console
    for row, alone in zip(resumed.rows, on_one.rows, strict=True):
        # Nodes with one rank do not share what they gather: other buffers are staged in a switch.
        assert row | {keys.PEAK_WEIGHT_BYTES: 0} == alone | {keys.PEAK_WEIGHT_BYTES: 0}
    assert resumed.weights == on_one.weights
