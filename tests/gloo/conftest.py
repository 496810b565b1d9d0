"""Ranks for all tests of a session, started from one warm forkserver."""

from __future__ import annotations

import pytest

from tests.gloo import preload  # noqa: F401  # before the test modules, which import the same without its filter
from tests.gloo.ranks import RankLauncher


@pytest.fixture(scope="session")
def run_ranks() -> RankLauncher:
    """`run_ranks(world_size, function, *args, timeout_s=240)` returns each rank's `function(rank, *args)`."""
    return RankLauncher()
