"""Reward processes next to Ray's ranks: they end with their rank, however that ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.worker_group import WorkerGroup
from hybridengine.data.reward_process import RewardProcess
from hybridengine.rows.protocols import ONE_TO_ALL, RankContext, register

pytestmark = pytest.mark.timeout(600)

GONE_S = 60.0


class GuardedWorker:
    """A rank with a reward process of its own."""

    def __init__(self, context: RankContext) -> None:
        self._function = RewardProcess("tests.unit.reward_cases:never_returns", timeout_s=60.0)
        self._function.start()
        self._rank = context.rank

    @register(ONE_TO_ALL)
    def place(self) -> tuple[int, str]:
        """Return the (process, folder) of the function."""
        assert self._function._process is not None
        return self._function._process.pid, str(self._function._process.folder)

    @register(ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @register(ONE_TO_ALL)
    def call(self, file: str) -> None:
        self._function.call({"responses": ["x"], "answers": [f"{file}.{self._rank}"]})

    def close(self) -> None:
        self._function.close()


@pytest.mark.parametrize("ending", ["idle", "in a call", "killed"])
def test_functions_end_with_their_ranks(ray_cluster: int, tmp_path: Path, ending: str) -> None:
    file = tmp_path / "called"
    with ResourcePool([1], timeout_s=60) as pool:
        group = WorkerGroup(pool, GuardedWorker, role="guarded", parallel="1-1-1")
        places = group.place().get()
        assert all(is_there(place) for place in places)
        if ending == "in a call":
            group.call(str(file))
            deadline = time.monotonic() + 30
            while not Path(f"{file}.0").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        if ending == "killed":
            for process in group.process().get():
                os.kill(process, signal.SIGKILL)
        pool.close()
    deadline = time.monotonic() + GONE_S
    while any(is_there(place) for place in places):
        assert time.monotonic() < deadline, f"still there: {[place for place in places if is_there(place)]}"
        time.sleep(0.1)


def is_there(place: tuple[int, str]) -> bool:
    """Return True if the function's process or its folder still exists."""
    group, folder = place
    return Path(f"/proc/{group}").exists() or Path(folder).exists()
