"""Order and selection of the tests: quick ones first, or last among several workers; `gpu` ones only on a GPU."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("shared", deadline=None)  # no test depends on time: machines are shared
settings.load_profile("shared")

# torch's stores resolve loopback addresses: a name server that drops some of the queries costs 5 s for each.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

LANES = ("unit", "gloo", "full")
"""Folders of tests, in the order in which they run; a test in gloo/ or full/ carries that marker."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder, sort the folders, and deselect `gpu` tests if there is no GPU."""
    root = Path(__file__).parent
    for item in items:
        lane = _lane(item, root)
        if lane in ("gloo", "full"):
            item.add_marker(lane)
    # The sort is stable inside a folder. Several workers start with long files, so that they end together.
    several = hasattr(config, "workerinput")
    items.sort(key=lambda item: LANES.index(_lane(item, root)), reverse=several)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]


class FilesOrFolders(LoadScopeScheduling):
    """Distributes files among several workers, but keeps the tests that share a slow start on one worker: Ray and its
    ranks in tests/full, forkservers in tests/gloo and tests/full/engines.

    Runs often wait for processes to start and for limits to expire; the other workers use the cores meanwhile.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        if file.startswith(("tests/unit/", "tests/full/programs/")):
            return file
        shared = ("tests/full/engines", "tests/full", "tests/gloo")
        return next((folder for folder in shared if file.startswith(f"{folder}/")), file)


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker for each core, and one more for the worker that mostly waits."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesOrFolders:
    """Return the scheduler that distributes tests among several workers."""
    return FilesOrFolders(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what the test modules have imported, so that the garbage collector does not search it in every test."""
    gc.collect()
    gc.freeze()


def _lane(item: pytest.Item, root: Path) -> str:
    parts = item.path.relative_to(root).parts if item.path.is_relative_to(root) else ()
    return parts[0] if parts and parts[0] in LANES else "unit"


def _has_gpu() -> bool:
    import torch  # only if a collected test needs the answer

    return torch.cuda.is_available()
