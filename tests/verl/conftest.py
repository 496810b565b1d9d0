"""Tests of the plug-in for verl's trainer, in an environment with verl; they are not collected where it is missing."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

HAS_VERL = importlib.util.find_spec("verl") is not None
collect_ignore_glob = [] if HAS_VERL else ["test_*.py"]

if HAS_VERL:  # read when verl is imported, by this process and by the ranks
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_VENDOR": "hybridengine"}


@pytest.fixture(scope="session")
def run_ranks() -> Any:
    """Override the fixture of all tests with ranks that are forks of a process with verl."""
    from tests.gloo.ranks import RankLauncher

    return RankLauncher(("tests.verl.engine_ranks",))
