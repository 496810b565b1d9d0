"""A forkserver with vLLM for all tests of this folder, which need no Ray."""

from __future__ import annotations

import pytest

from tests.full.engines.vllm_ranks import VllmRankLauncher


@pytest.fixture(scope="session")
def run_vllm_ranks() -> VllmRankLauncher:
    """`run_vllm_ranks(world_size, function, *args, timeout_s=240)` returns each rank's `function(rank, *args)`."""
    return VllmRankLauncher()
