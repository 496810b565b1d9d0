"""Hosts that cannot carry out a run together: each fault is one error with node and remedy, before the models load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from hybridengine import formatting
from hybridengine.data.tokenizer import build_arithmetic_tokenizer
from hybridengine.doctor.node_facts import sources_digest
from tests.machines.hosts import Network, joined_hosts
from tests.machines.jobs import LIMIT_S, SHORT
from tests.machines.ray_nodes import COMMAND, RayCluster, warm_folder

pytestmark = pytest.mark.timeout(900)

RANKS = "cluster.ranks_per_node=[2,2]"
APART = (
    "cluster.ranks_per_node=[2]",
    "cluster.pools.values={roles: [critic, reference], ranks_per_node: [2]}",
    "actor.parallel=1-2-1",
    "actor.generate=1-1",
    "critic.parallel=1-1-2",
    "reference.parallel=1-1-2",
)
"""Pools of their own on two hosts, which no torch.distributed world joins."""
OTHER_VERSION = "99.1"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def network(shared: Path, warm_ray: dict[str, str]) -> Iterator[Network]:
    with joined_hosts(["first", "second"], shared=[shared, warm_folder(warm_ray)]) as network:
        yield network


@pytest.fixture(scope="module")
def cluster(network: Network, warm_ray: dict[str, str]) -> RayCluster:
    return RayCluster(network.hosts, warm_ray)


def refused(cluster: RayCluster, *changes: str) -> str:
    """Return what a run says that does not start."""
    where = f"cluster.address={cluster.address}"
    command = (COMMAND, "train", "configs/arithmetic.yaml", *SHORT, where, *changes)
    done = cluster.run(*command, limit_s=LIMIT_S, check=False)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stdout
    assert not [line for line in done.stdout.splitlines() if "warm-up" in line], done.stdout
    return done.stdout


def test_a_folder_that_is_not_shared(cluster: RayCluster):
    said = refused(cluster, RANKS, "run.folder=/tmp/own")
    assert (
        "node 10.77.0.2: /tmp/own/arithmetic does not hold the same files there as here: checkpoints would be in pieces;"
        " mount the same file system at /tmp/own/arithmetic on all nodes" in said
    )


def test_files_that_one_host_lacks_and_versions_that_differ(
    cluster: RayCluster, network: Network, shared: Path
):
    first, second = network.hosts
    build_arithmetic_tokenizer().save_pretrained(shared / "tokenizer")
    first.run("cp", "-r", shared / "tokenizer", "/tmp/tokenizer")
    packages = Path(str(metadata.distribution("transformers").locate_file("")))
    (described,) = packages.glob("transformers-*.dist-info/METADATA")
    other, version = shared / "METADATA", metadata.version("transformers")
    other.write_text(described.read_text().replace(f"Version: {version}", f"Version: {OTHER_VERSION}", 1))
    source, changed = Path(formatting.__file__), shared / "formatting.py"
    changed.write_text(source.read_text() + "# changed\n")
    mounts = {other: described, changed: source}
    for file, place in mounts.items():
        second.run("mount", "--bind", file, place)
    try:
        said = refused(cluster, RANKS, f"run.folder={shared}", "model.tokenizer=/tmp/tokenizer")
    finally:
        for place in mounts.values():
            second.run("umount", place)
    assert (
        f"transformers differs: {version} on 10.77.0.1; {OTHER_VERSION} on 10.77.0.2; install the same lock on all nodes"
        in said
    )
    digest = sources_digest()
    assert f"sources of hybridengine differ (SHA-256): {digest} on 10.77.0.1; " in said
    assert "node 10.77.0.2: model.tokenizer=/tmp/tokenizer cannot be read (No such file or directory)" in said


def test_too_few_hosts_and_too_many_ranks_on_one(cluster: RayCluster, shared: Path):
    for ranks, wanted in (("[2,1,1]", "4 ranks on 3 nodes"), ("[3,1]", "4 ranks on 2 nodes")):
        said = refused(cluster, f"cluster.ranks_per_node={ranks}", f"run.folder={shared}")
        assert wanted in said
        assert "the cluster has room for [2, 2] ranks per node" in said


def test_a_firewall_between_the_hosts_of_ranks(shared: Path, warm_ray: dict[str, str]):
    """Both reach the head node, which has no ranks of the run."""
    names = ["head", "first", "second"]
    with joined_hosts(names, shared=[shared, warm_folder(warm_ray)]) as network:
        cluster = RayCluster(network.hosts[:1], warm_ray, num_cpus=0)
        for host in network.hosts[1:]:
            cluster.join(host, num_cpus=2)
        network.block(("first", "second"))
        where = (f"cluster.address={cluster.address}", RANKS, f"run.folder={shared}", "timeouts.start_s=120")
        done = cluster.run(
            COMMAND, "train", "configs/arithmetic.yaml", *SHORT, *where, limit_s=LIMIT_S, check=False
        )
        apart = refused(cluster, *APART, f"run.folder={shared}")
    assert done.returncode == 1, done.stdout
    assert "host second cannot reach rank 0's store at 10.77.0.2" in done.stdout
    assert "Traceback" not in done.stdout
    for node, other in (("10.77.0.2", "10.77.0.3"), ("10.77.0.3", "10.77.0.2")):
        assert re.search(
            rf"node {node}: a port of {other} cannot be reached \((TimeoutError: timed out|OSError: No route to host)\);"
            " open the ports that the system chooses",
            apart,
        ), apart
