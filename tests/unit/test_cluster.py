"""Starting Ray on this machine, where Ray itself cannot be started as it would have to be: too late, or never."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from hybridengine.controller import cluster
from hybridengine.errors import WorkerError


@pytest.mark.parametrize("num_late", [0, 2, 3])
def test_a_machine_too_busy_for_ray_gets_another_chance(monkeypatch: pytest.MonkeyPatch, num_late: int):
    """Ray raises a bare exception when its processes take more than 30 s."""
    calls: list[str] = []

    def init(**settings: Any) -> None:
        calls.append(settings["address"])
        if calls.count("local") <= num_late:
            raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    if num_late < cluster.START_ATTEMPTS:
        cluster.start_ray(num_cpus=1, num_gpus=0)
    else:
        with pytest.raises(WorkerError, match=r"has not started .*3 times over \(The current node timed out"):
            cluster.start_ray(num_cpus=1, num_gpus=0)
    assert calls.count("shutdown") == num_late
    assert calls.count("local") == min(num_late + 1, cluster.START_ATTEMPTS)
