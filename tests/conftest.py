"""Order of the tests: quick ones first, or last among several workers; `gpu` ones are skipped without a GPU.

The workers of `-n` are forks of one warm process, which imports for all of them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from hybridengine.backends.vllm.environment import ON_CPU
from hybridengine.importing import nothing_collected
from tests import warm_workers

imports = contextlib.ExitStack()
"""Closed when the tests are collected."""
imports.enter_context(nothing_collected())

settings.register_profile("shared", deadline=None)  # no test depends on time: machines are shared
settings.load_profile("shared")

# Models are tiny: more threads only wait for one another, and take the time of the other workers' tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch's stores resolve loopback addresses: a name server that drops some of the queries costs 5 s for each.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

FOLDERS = (
    "tests/unit",
    "tests/full/programs",
    "tests/full/engines",
    "tests/machines",
    "tests/gloo",
    "tests/full",
)
"""Folders of tests, in the order in which they run; several workers begin with the last, which takes longest."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder, sort the folders, and skip `gpu` tests if there is no GPU."""
    for item in items:
        lane = folder_of(item.nodeid).split("/")[1]
        if lane != "unit":
            item.add_marker(lane)
    # The sort is stable inside a folder.
    several = hasattr(config, "workerinput")
    items.sort(key=lambda item: FOLDERS.index(folder_of(item.nodeid)), reverse=several)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip("needs an NVIDIA GPU, and torch sees none"))


def folder_of(nodeid: str) -> str:
    """Return the folder of a test among `FOLDERS`; the first one for a test elsewhere."""
    return next((folder for folder in FOLDERS if nodeid.startswith(f"{folder}/")), FOLDERS[0])


class FilesOrFolders(LoadScopeScheduling):
    """Distributes files among several workers, but keeps the tests that share a slow start on one worker: Ray and its
    ranks in tests/full, the forkserver of tests/gloo and tests/full/engines. Files of tests/full/programs and
    tests/machines share nothing.

    Runs often wait for processes to start and for limits to expire; the other workers use the cores meanwhile.
    """

    def _split_scope(self, nodeid: str) -> str:
        folder = folder_of(nodeid)
        if folder in ("tests/unit", "tests/full/programs", "tests/machines"):
            return nodeid.split("::", 1)[0]
        return "tests/full" if folder == "tests/full" else "forkserver"


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker for each core, and one more for the worker that mostly waits."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesOrFolders:
    """Return the scheduler that distributes tests among several workers."""
    return FilesOrFolders(config, log)


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Start the warm process from which the workers are forked; it ends with this process."""
    imports.close()  # this process collects no tests
    ends = contextlib.ExitStack()
    config.add_cleanup(ends.close)
    folder = ends.enter_context(tempfile.TemporaryDirectory())
    os.environ |= ends.enter_context(warm_workers.warm_workers(Path(folder), ON_CPU))
    for spec in specs:
        spec.python = shlex.join(warm_workers.warm_program())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what the test modules have imported, so that the garbage collector does not search it in every test."""
    imports.close()


@pytest.fixture(scope="session")
def run_ranks() -> Any:
    """`run_ranks(world_size, function, *args, timeout_s=240)` returns each rank's `function(rank, *args)`."""
    from tests.gloo.ranks import RankLauncher  # not in the process that hands out tests

    return RankLauncher()


@pytest.fixture(scope="session")
def warm_ray() -> Iterator[dict[str, str]]:
    """Yield the environment variables with which Ray starts workers that have vLLM and Megatron-core imported."""
    from tests.gloo.ranks import ENVIRONMENT  # not in the process that hands out tests

    with (
        tempfile.TemporaryDirectory() as folder,
        warm_workers.warm_workers(Path(folder), ON_CPU | ENVIRONMENT) as variables,
    ):
        yield variables


def _has_gpu() -> bool:
    import torch  # only if a collected test needs the answer

    return torch.cuda.is_available()
