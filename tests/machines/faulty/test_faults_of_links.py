"""Links that fail in the middle of a run: it ends with the results of an undisturbed one, or with an error that names
host and link within its limits, and continues once the link is mended."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.machines.faults import (
    BUSY_S,
    CALL_S,
    DIAGNOSIS_S,
    FAULT_AFTER,
    NAMES,
    NODE_LOST_S,
    SAVE_S,
    Job,
    Left,
    left_in,
    start,
    write_run,
)
from tests.machines.hosts import Network, joined_hosts
from tests.machines.ray_nodes import RayCluster, warm_folder

pytestmark = pytest.mark.timeout(900)


@contextmanager
def running(
    folder: Path, warm_ray: dict[str, str], *names: str, **sections: Any
) -> Iterator[tuple[Network, RayCluster, Job]]:
    """Yield hosts, their cluster, and the run, which has come to the point where a fault is made."""
    shared = [folder, warm_folder(warm_ray)]
    with joined_hosts(names or NAMES, shared=shared) as network:
        cluster = RayCluster(network.hosts, warm_ray)
        job = start(cluster, "train", write_run(folder, **sections))
        job.wait_for(FAULT_AFTER, BUSY_S)
        yield network, cluster, job


def test_a_host_that_disappears_is_named_and_the_run_resumes_when_it_is_back(
    tmp_path: Path, warm_ray: dict[str, str], undisturbed: Left
):
    """Ray gives the host up before a call has reached its limit."""
    timeouts = {"call_s": NODE_LOST_S + BUSY_S}
    with running(tmp_path, warm_ray, timeouts=timeouts) as (network, cluster, job):
        network.change("second", up=False)
        assert job.end(NODE_LOST_S + DIAGNOSIS_S + BUSY_S) == 1
        said = job.console.splitlines()
        error = next(
            number for number, line in enumerate(said) if line.startswith("hybridengine: WorkerError")
        )
        assert re.search(r"on rank 1 \(.*node 10\.77\.0\.2\).* its node has died", said[error])
        assert re.fullmatch(
            r"  node 10\.77\.0\.2 \(host second\): the link to the host is down, or the host is: first gets no answer"
            r" \(.*\); mend it and start Ray there again, or .*",
            said[error + 2],
        ), job.console
        assert "the cluster has room for [2] ranks per node: 10.77.0.1" in said[error + 3]
        assert "Traceback" not in job.console
        network.change("second", up=True)
        second = network.hosts[1]
        second.run(sys.executable, "-m", "ray.scripts.scripts", "stop", "--force", env=cluster.variables)
        cluster.join(second)
        resumed = start(cluster, "train", tmp_path / "run.yaml", "resume=auto")
        assert resumed.end(BUSY_S) == 0, resumed.console
    assert left_in(tmp_path) == undisturbed


def test_a_host_that_disappears_is_replaced(tmp_path: Path, warm_ray: dict[str, str], undisturbed: Left):
    """A call reaches its limit before Ray has given the host up."""
    with running(tmp_path, warm_ray, *NAMES, "spare") as (network, _, job):
        network.change("second", up=False)
        assert job.end(NODE_LOST_S + DIAGNOSIS_S + 2 * BUSY_S) == 0, job.console
    assert "node 10.77.0.2 (host second): the link to the host is down" in job.console, job.console
    assert "starting the ranks again (1 of" in job.console
    assert left_in(tmp_path) == undisturbed


@pytest.mark.parametrize("seconds", [4, 15])
def test_a_host_that_comes_back_before_ray_gives_it_up(
    seconds: float, tmp_path: Path, warm_ray: dict[str, str], undisturbed: Left
):
    """TCP sends again, at intervals that double; Ray's own connections end after about ten seconds."""
    timeouts = {"call_s": NODE_LOST_S + BUSY_S}
    with running(tmp_path, warm_ray, timeouts=timeouts) as (network, _, job):
        network.change("second", up=False)
        time.sleep(seconds)
        network.change("second", up=True)
        assert job.end(2 * BUSY_S) == 0, job.console
    assert seconds > 10 or "starting the ranks again" not in job.console, job.console
    assert left_in(tmp_path) == undisturbed


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"rate_bits_s": 2e7, "delay_s": 0.01}, id="slow"),
        pytest.param({"loss": 0.01}, id="lossy"),
    ],
)
def test_a_slow_or_lossy_link_changes_no_result(
    values: dict[str, float], tmp_path: Path, warm_ray: dict[str, str], undisturbed: Left
):
    with running(tmp_path, warm_ray) as (network, _, job):
        network.change("second", **values)
        assert job.end(2 * BUSY_S) == 0, job.console
        dropped = network.dropped_frames()
    if "loss" in values:
        assert dropped["first", "second"] > 10
    assert "starting the ranks again" not in job.console
    assert left_in(tmp_path) == undisturbed


def test_a_link_that_drops_large_packets_is_named(tmp_path: Path, warm_ray: dict[str, str]):
    """Ray's health checks pass, since their packets are small."""
    with running(tmp_path, warm_ray) as (network, _, job):
        network.change("second", mtu=1400)
        assert job.end(SAVE_S + CALL_S + DIAGNOSIS_S + BUSY_S) == 1
    text = "packets of 1500 bytes to {} are lost, and small ones arrive: ranks would hang"
    error = job.console[job.console.index("\nhybridengine: WorkerError") :]
    assert re.search(r"did not end within 40 s: \d of 2 ranks have not answered", error)
    assert f"node 10.77.0.1 (host first): {text.format('10.77.0.2')}" in error
    assert "ip link set dev NAME mtu" in error
    assert "starting the ranks again" not in job.console
