"""Order and selection of the tests: quick ones first, or last among several workers; `gpu` ones only on a GPU."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("shared", deadline=None)  # no test is about time: machines are shared
settings.load_profile("shared")

# torch's stores ask for the names of loopback addresses: a name server that drops some of many questions costs 5 s each.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

LANES = ("unit", "gloo", "full")
"""Folders of tests, in the order in which they run; a test in gloo/ or full/ carries that marker."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder, sort the folders, and leave out `gpu` tests where there is no GPU."""
    root = Path(__file__).parent
    for item in items:
        lane = _lane(item, root)
        if lane in ("gloo", "full"):
            item.add_marker(lane)
    # Stable: the order inside a folder stays. Several workers begin with long files, so that they end together.
    several = hasattr(config, "workerinput")
    items.sort(key=lambda item: LANES.index(_lane(item, root)), reverse=several)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]


class FilesOrFolders(LoadScopeScheduling):
    """Several workers take file after file, but what shares a slow start is one worker's: Ray and its ranks in
    tests/full, vLLM's forkserver in tests/full/engines.

    Runs wait for processes that start and for limits that they find: meanwhile the other workers have the cores.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        if not file.startswith("tests/full/") or file.startswith("tests/full/programs/"):
            return file
        return "tests/full/engines" if file.startswith("tests/full/engines/") else "tests/full"


def pytest_xdist_auto_num_workers() -> int:
    """One for each core, and the one that mostly waits."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesOrFolders:
    """What several workers share out among them."""
    return FilesOrFolders(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the test modules have imported stays: the garbage collector need not search it in every test."""
    gc.collect()
    gc.freeze()


def _lane(item: pytest.Item, root: Path) -> str:
    parts = item.path.relative_to(root).parts if item.path.is_relative_to(root) else ()
    return parts[0] if parts and parts[0] in LANES else "unit"


def _has_gpu() -> bool:
    import torch  # only where a collected test needs the answer

    return torch.cuda.is_available()
