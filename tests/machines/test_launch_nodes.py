"""Nodes of a launch find the address at which they reach each other, or end and say which node does not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines.hosts import ROOT, Host, Network, joined_hosts
from tests.machines.switch import INTERFACE

NAMES = ("first", "second")
EVERYWHERE = "172.17.0.1"
"""An address that each host has for itself, as that of Docker's bridge."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def network(shared: Path) -> Iterator[Network]:
    with joined_hosts(NAMES, shared=[shared]) as network:
        for host in network.hosts:
            host.run("ip", "addr", "add", f"{EVERYWHERE}/32", "dev", INTERFACE)
        yield network


def node(host: Host, folder: Path, limit_s: float, *options: str) -> subprocess.Popen[str]:
    """Start a host's node of a launch of two."""
    return host.start(
        *(sys.executable, "-m", "hybridengine.cli.main", "launch", "node", "configs/arithmetic.yaml"),
        *("cluster.ranks_per_node=[2,2]", f"run.folder={folder}", "--hosts", ",".join(NAMES)),
        *("--index", NAMES.index(host.name), "--launch-folder", folder, "--start-limit", limit_s, *options),
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_nodes_meet_at_the_address_that_is_the_same_host_for_both(network: Network, shared: Path):
    first, second = network.hosts
    folder = shared / "met"
    with node(first, folder, 120) as head, node(second, folder, 120) as other:
        found = written(folder / "node-1.json", head, other)
        for process in (head, other):
            process.kill()
    assert set(json.loads((folder / "head.json").read_text())["addresses"]) == {first.address, EVERYWHERE}
    assert found["ways"] == {first.address: second.address}


def test_a_node_that_does_not_reach_the_first_one_is_named(network: Network, shared: Path):
    first, second = network.hosts
    network.block(("second", "first"))
    try:
        with node(first, shared / "blocked", 120) as head, node(second, shared / "blocked", 120) as other:
            said, others = (process.communicate(timeout=150)[0] for process in (head, other))
    finally:
        network.block()
    assert head.returncode == 2 and other.returncode == 1
    assert "and second reached none of them; open the ports that the system chooses between the nodes" in said
    assert "second reached none of them" in others


def test_a_node_that_does_not_come_is_named(network: Network, shared: Path):
    with node(network.hosts[0], shared / "alone", 1) as head:
        said, _ = head.communicate(timeout=120)
    assert head.returncode == 1
    assert "other nodes: 0 of 1; waiting for second in" in said and "raise --start-limit" in said


def test_an_interface_that_a_host_lacks_is_named(network: Network, shared: Path):
    with node(network.hosts[0], shared / "lacking", 60, "--interface", "ib0") as head:
        said, _ = head.communicate(timeout=120)
    assert head.returncode == 2
    assert "--interface ib0 has no address on first, which has 10.77.0.1" in said


def written(file: Path, *processes: subprocess.Popen[str]) -> dict[str, dict[str, str]]:
    """Return what a file says as soon as it is there."""
    deadline = time.monotonic() + 120
    while not file.exists():
        assert all(process.poll() is None for process in processes) and time.monotonic() < deadline
        time.sleep(0.1)
    return json.loads(file.read_text())
