"""Hosts whose clocks are apart, whose shared memory is full, or that have an interface that leads nowhere, in runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hybridengine.report.timeline import TIMELINE_FILE, read_timeline
from tests.machines.faults import (
    BUSY_S,
    DIAGNOSIS_S,
    FAULT_AFTER,
    NAMES,
    NODE_LOST_S,
    Left,
    add_dead_interface,
    left_in,
    start,
    write_run,
)
from tests.machines.hosts import joined_hosts
from tests.machines.launching import launch_environment
from tests.machines.ray_nodes import RayCluster, warm_folder

pytestmark = pytest.mark.timeout(900)

AHEAD_S = 3600.0
SHM_BYTES = 200 * 2**20


def test_clocks_that_are_apart_change_no_result(tmp_path: Path, warm_ray: dict[str, str], undisturbed: Left):
    with joined_hosts(NAMES, shared=[tmp_path, warm_folder(warm_ray)]) as network:
        cluster = RayCluster(network.hosts[:1], warm_ray)
        cluster.join_ahead(network.hosts[1], AHEAD_S)
        timeouts = {"start_s": 300, "call_s": 300}
        job = start(cluster, "train", write_run(tmp_path, timeouts=timeouts))
        assert job.end(4 * BUSY_S) == 0, job.console
    assert left_in(tmp_path) == undisturbed
    spans = read_timeline(tmp_path / "runs" / "run" / TIMELINE_FILE).spans
    begin = {rank: min(span.start_s for span in spans if span.rank == rank) for rank in (0, 1)}
    assert begin[1] - begin[0] == pytest.approx(AHEAD_S, abs=BUSY_S)  # the clocks were apart


def test_full_shared_memory_is_named_where_it_kills_a_rank(
    tmp_path: Path, warm_ray: dict[str, str], undisturbed: Left
):
    """Ranks that have what they need continue; one that starts is killed by the kernel, with SIGBUS."""
    shared = [tmp_path, warm_folder(warm_ray)]
    with joined_hosts(NAMES, shared=shared, shm_bytes=SHM_BYTES) as network:
        cluster = RayCluster(network.hosts, warm_ray)
        second = network.hosts[1]
        job = start(cluster, "train", write_run(tmp_path))
        job.wait_for(FAULT_AFTER, BUSY_S)
        second.run("dd", "if=/dev/zero", "of=/dev/shm/left", "bs=64K", check=False)
        assert job.end(BUSY_S) == 0, job.console
        assert left_in(tmp_path) == undisturbed
        again = start(cluster, "train", write_run(tmp_path, run={"name": "again"}))
        assert again.end(DIAGNOSIS_S + BUSY_S) == 1
    error = again.console[again.console.index("\nhybridengine: ") :]
    text = "/dev/shm has 0 B free: processes that use more of it are killed (SIGBUS); remove what ended processes"
    assert f"node 10.77.0.2 (host second): {text}" in error
    assert "host first" not in error
    assert "starting the ranks again" not in again.console


def test_an_address_that_leads_nowhere_is_named(tmp_path: Path, warm_ray: dict[str, str]):
    """Ray on the second host has been started with the address of the wrong interface."""
    with joined_hosts(NAMES, shared=[tmp_path, warm_folder(warm_ray)]) as network:
        addresses = add_dead_interface(network)
        cluster = RayCluster(network.hosts[:1], warm_ray)
        cluster.join(network.hosts[1], "--node-ip-address", addresses[1])
        job = start(cluster, "train", write_run(tmp_path))
        assert job.end(NODE_LOST_S + 2 * DIAGNOSIS_S + BUSY_S) != 0
    error = job.console[job.console.index("\nhybridengine: ") :]
    assert f"{addresses[1]} (host second), which no longer answers Ray" in error, job.console
    assert "Traceback" not in error


def test_a_launch_takes_the_interface_that_leads_to_the_other_host(
    tmp_path: Path, warm_ray: dict[str, str], undisturbed: Left
):
    file = write_run(tmp_path, cluster={"device": "cpu"})
    with joined_hosts(NAMES, shared=[tmp_path, warm_folder(warm_ray)]) as network:
        add_dead_interface(network)
        nodes = [
            host.start(
                *(sys.executable, "-m", "hybridengine.cli.main", "launch", "node", file, "--hosts"),
                *(",".join(NAMES), "--index", index, "--launch-folder", tmp_path / "launch"),
                env=launch_environment(warm_ray),
            )
            for index, host in enumerate(network.hosts)
        ]
        assert [node.wait(4 * BUSY_S) for node in nodes] == [0, 0]
    assert left_in(tmp_path) == undisturbed
