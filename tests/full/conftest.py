"""One Ray cluster for all tests of a session: starting it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from hybridengine.controller.cluster import start_ray

NUM_CPUS = 8
"""Logical CPUs of the cluster: ranks that the pools of a test can have together."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[int]:
    """A running local cluster; its number of logical CPUs."""
    start_ray(num_cpus=NUM_CPUS, num_gpus=0)
    yield NUM_CPUS
    ray.shutdown()
