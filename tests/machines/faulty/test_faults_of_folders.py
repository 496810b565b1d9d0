"""A shared folder that hangs or lags on one host in the middle of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.machines.faults import (
    BUSY_S,
    CALL_S,
    DIAGNOSIS_S,
    FAULT_AFTER,
    NAMES,
    SAVE_S,
    Job,
    Left,
    MountedFolder,
    left_in,
    start,
    write_run,
)
from tests.machines.hosts import joined_hosts
from tests.machines.ray_nodes import RayCluster, warm_folder

pytestmark = pytest.mark.timeout(900)


@contextmanager
def running(folder: Path, warm_ray: dict[str, str]) -> Iterator[tuple[RayCluster, list[MountedFolder], Job]]:
    """Yield the cluster, each host's mount of the folder, and the run, which has come to the point of the fault."""
    with joined_hosts(NAMES, shared=[folder, warm_folder(warm_ray)]) as network:
        mounts = [MountedFolder(host, folder) for host in network.hosts]
        cluster = RayCluster(network.hosts, warm_ray)
        job = start(cluster, "train", write_run(folder))
        job.wait_for(FAULT_AFTER, BUSY_S)
        try:
            yield cluster, mounts, job
        finally:
            for mount in mounts:
                mount.answer()  # processes in its calls could not be ended


def test_a_folder_that_hangs_on_the_host_of_the_run_ends_it_and_it_resumes_later(
    tmp_path: Path, warm_ray: dict[str, str], undisturbed: Left
):
    with running(tmp_path, warm_ray) as (cluster, mounts, job):
        mounts[0].hang()
        job.wait_for("has not answered for 20 s", SAVE_S + BUSY_S)
        mounts[0].answer()
        assert job.end(BUSY_S) != 0
        where = f"{tmp_path}/runs/run on host first has not answered for"
        assert f"warning: {where} 10 s; the run waits for it, up to 20 s (timeouts.save_s)" in job.console
        assert (
            f"hybridengine: OutputError: {where} 20 s (timeouts.save_s); check its file system" in job.console
        )
        resumed = start(cluster, "train", tmp_path / "run.yaml", "resume=auto")
        assert resumed.end(BUSY_S) == 0, resumed.console
    assert left_in(tmp_path) == undisturbed


def test_a_folder_that_hangs_on_another_host_is_named(tmp_path: Path, warm_ray: dict[str, str]):
    with running(tmp_path, warm_ray) as (_, mounts, job):
        mounts[1].hang()
        assert job.end(SAVE_S + 2 * CALL_S + DIAGNOSIS_S + BUSY_S) == 1
    error = job.console[job.console.index("\nhybridengine: WorkerError") :]
    assert "rank 1 (" in error and "node 10.77.0.2" in error
    reason = f"{tmp_path}/runs/run cannot be written to (TimeoutError: no answer within 30 s)"
    assert f"node 10.77.0.2 (host second): {reason}; mount the same file system" in error
    assert "host first" not in error
    assert "starting the ranks again" not in job.console


def test_a_folder_that_lags_delays_the_run_alone(tmp_path: Path, warm_ray: dict[str, str], undisturbed: Left):
    """On every host it answers for one second in four."""
    with running(tmp_path, warm_ray) as (_, mounts, job):
        over = threading.Event()

        def lag() -> None:
            while not over.is_set():
                for mount in mounts:
                    mount.hang()
                time.sleep(3)
                for mount in mounts:
                    mount.answer()
                time.sleep(1)

        lagging = threading.Thread(target=lag)
        lagging.start()
        try:
            assert job.end(3 * BUSY_S) == 0, job.console
        finally:
            over.set()
            lagging.join()
    assert "starting the ranks again" not in job.console
    assert left_in(tmp_path) == undisturbed
