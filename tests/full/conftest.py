"""What is slow to start, once for all tests of a session: a Ray cluster, and a forkserver with vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
import torch

from hybridengine.controller.cluster import start_ray
from tests.full.vllm_ranks import VllmRankLauncher
from tests.gloo import preload  # noqa: F401  # before the test modules, which import the same without its filter

NUM_CPUS = 8
"""Logical CPUs of the cluster: ranks that the pools of a test can have together."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Reference models are tiny: more threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[int]:
    """A running local cluster; its number of logical CPUs."""
    start_ray(num_cpus=NUM_CPUS, num_gpus=0)
    yield NUM_CPUS
    ray.shutdown()


@pytest.fixture(scope="session")
def run_vllm_ranks() -> VllmRankLauncher:
    """`run_vllm_ranks(world_size, function, *args, timeout_s=60)`: what each rank's `function(rank, *args)` returns."""
    return VllmRankLauncher()
