"""Starting Ray on this machine when Ray starts too late or not at all."""

from __future__ import annotations

import signal
import socket
import sys
from typing import Any

import pytest
import ray
from ray._private import utils

from hybridengine.controller import cluster
from hybridengine.errors import ConfigError, WorkerError

pytestmark = pytest.mark.usefixtures("no_ray")


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


def test_sigterm_keeps_its_handler_while_ray_connects(monkeypatch: pytest.MonkeyPatch):
    """`ray.init` sets one that calls sys.exit(15)."""
    seen = []

    def init(**settings: Any) -> None:
        utils.set_sigterm_handler(lambda number, frame: sys.exit(number))
        seen.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    cluster.start_ray(num_cpus=1, num_gpus=0)
    assert seen == [before] and signal.getsignal(signal.SIGTERM) is before


def test_an_address_where_nobody_answers_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    """Ray itself would retry for minutes."""
    monkeypatch.setattr(ray, "init", lambda **settings: pytest.fail("it was not looked at before"))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it never listens: the port refuses, and nobody else can take it
        for address in (f"127.0.0.1:{silent.getsockname()[1]}", "127.0.0.1:99999"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            with pytest.raises(
                ConfigError, match=rf"no Ray cluster answers at '{address}' \(.*\); start one with"
            ):
                cluster.start_ray()


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "local"])
def test_other_addresses_are_left_to_ray(address: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", lambda **settings: seen.append(settings["address"]))
    cluster.start_ray()
    assert seen == [address]
