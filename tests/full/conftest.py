"""Slow-to-start fixtures that the session shares: a Ray cluster with warm workers, and four ranks in it."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import ray
import yaml

from hybridengine.config import load_config
from hybridengine.controller import relays
from hybridengine.controller.cluster import start_ray
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.report.step_rows import read_rows
from hybridengine.training.run import train
from tests.full.probe_workers import ProbeWorker
from tests.full.tiny_runs import SECTIONS, Run

NUM_CPUS = 12
"""Logical CPUs of the cluster: those of the shared pool, and eight for the pools of a test."""


@pytest.fixture(scope="session")
def ray_cluster(warm_ray: dict[str, str]) -> Iterator[int]:
    """Start a local cluster; yield its number of logical CPUs."""
    with mock.patch.dict(os.environ, warm_ray):
        start_ray(num_cpus=NUM_CPUS, num_gpus=0)
    yield NUM_CPUS
    ray.shutdown()


@pytest.fixture(scope="session", params=[relays.NUM_CALLED, 2], ids=["direct", "relays"])
def num_called(request: pytest.FixtureRequest) -> int:
    """Return how many processes the controller of `pool` calls: the four ranks, or two relays."""
    return request.param


@pytest.fixture(scope="session")
def pool(ray_cluster: int, num_called: int) -> Iterator[ResourcePool]:
    """Four ranks for all tests; a test that ends or blocks ranks for good makes its own pool."""
    with ResourcePool([4], env={"PROBE": "seen"}, timeout_s=60) as pool:
        with mock.patch.multiple(relays, NUM_CALLED=num_called, FAN_OUT=2):
            pool.start()
        yield pool


@pytest.fixture(scope="session")
def actor(pool: ResourcePool) -> WorkerGroup:
    """Probe workers, trained 2-2-1 and generating 1-1."""
    return WorkerGroup(pool, ProbeWorker, role="actor", parallel="2-2-1", generate="1-1")


@pytest.fixture(scope="session")
def critic(pool: ResourcePool) -> WorkerGroup:
    """Probe workers on the same processes, trained 1-2-2."""
    return WorkerGroup(pool, ProbeWorker, role="critic", parallel="1-2-2", config={"offset": 100})


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, ray_cluster: int) -> Run:
    """A tiny run on four ranks."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(SECTIONS))
    config = load_config(folder / "tiny.yaml", [f"run.folder={folder / 'runs'}"])
    console = io.StringIO()
    with contextlib.redirect_stdout(console):
        train(config)
    return Run(config, config.run_folder, read_rows(config.run_folder), console.getvalue())
